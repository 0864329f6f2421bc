# make demo   install, get the default model, ingest the examples, ask in two orders
# make test   install what the tests need, get the default model, run the tests
# make lint   style, types and package rules
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The model is shared by demo and tests; nothing is written outside this folder.
export CACHEBLEND_MODELS_DIR := $(CURDIR)/.cache/models
DEMO := CACHEBLEND_STORE=$(CURDIR)/.demo/store
MODEL := $(CACHEBLEND_MODELS_DIR)/smollm2-135m/config.json

.PHONY: demo test lint clean install

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt $(wildcard engine/kernels/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

$(MODEL): | $(INSTALLED)
	$(BIN)/cacheblend models pull smollm2-135m

demo: $(INSTALLED) $(MODEL)
	$(DEMO) $(BIN)/cacheblend ingest examples/docs
	$(DEMO) $(BIN)/python examples/demo.py

test: $(INSTALLED) $(MODEL)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .cache .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
