#!/usr/bin/env bash
# Installs the wheel that is in DIST into an empty environment, and uses it away from this folder as
# somebody who has nothing else would. The default model is taken from CACHEBLEND_MODELS_DIR.
#   tests/smoke.sh DIST CONSTRAINTS
set -euo pipefail
dist=$(realpath "$1") constraints=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --constraint "$constraints" "$dist"/*.whl
cd "$work"
export PATH="$work/venv/bin:$PATH" CACHEBLEND_HOME="$work/home" HF_HUB_OFFLINE=1
unset PYTHONPATH
python - <<'PYTHON'
from importlib import metadata, resources

# What a type checker, the kernels in C and the licence need is in the wheel, the tests are not.
for package in ("cbcli", "engine", "cache_store"):
    assert resources.files(package).joinpath("py.typed").is_file(), package
names = {str(path) for path in metadata.files("cacheblend") or ()}
assert any(name.endswith("LICENSE") for name in names), names
strays = {name.split("/")[0] for name in names} - {"cbcli", "engine", "cache_store", "..", "__pycache__"}
assert all(name.endswith(".dist-info") for name in strays), strays
PYTHON
test "$(cacheblend --version)" = "cacheblend $(python -c 'from importlib.metadata import version as v; print(v("cacheblend"))')"
cacheblend --help >/dev/null
mkdir notes
printf '# The harbour\n\nThe harbour office opens at seven. Boats longer than nine metres moor at the east pier.\n' > notes/harbour.md
cacheblend ingest --json notes > ingest.json
cacheblend ask --json --max-tokens 8 'When does the harbour office open?' > ask.json
cacheblend doctor --no-probe
python - <<'PYTHON'
import json
from pathlib import Path

ingested, asked = (json.loads(Path(name).read_text()) for name in ("ingest.json", "ask.json"))
assert ingested["documents"]["new"] == 1, ingested
assert asked["answer"] and asked["prompt"]["segments"], asked
print("smoke test passed:", asked["answer"])
PYTHON
