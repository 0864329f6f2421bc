"""What the settings come to: the model, tokenizer and dtype that stored KV is looked up by.

Telling it takes the tokenizer, and torch for what `auto` means here. Commands that have both write
it down beside the fingerprints, so that a listing of the store is spared them.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from cache_store.errors import CacheblendError
from cache_store.keys import KVSpec
from cache_store.usable import Present
from cbcli.settings import Settings, data_root

if TYPE_CHECKING:
    from engine.blueprint import Blueprint

_FILE = "present.json"
_KEPT = 200
# What of the settings decides what KV is looked up by, and what it is computed behind.
_NAMES = ("device", "dtype", "kv_dtype", "system", "separator", "template_date", "context")
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")


def present_of(blueprint: Blueprint) -> Present:
    """Of a model that is open. Reads its weights once, where they are new, to hash them."""
    return Present(blueprint.spec, tuple(blueprint.chunk_context))


def remember(settings: Settings, blueprint: Blueprint) -> None:
    """Writes down what the settings come to; where that can't be written, nothing is lost."""
    name = _name(settings, blueprint.path)
    known = _read()
    present = present_of(blueprint)
    entry = {"spec": asdict(present.spec), "context": list(present.context)}
    if known.get(name) == entry:
        return
    known.pop(name, None)
    known[name] = entry
    path = data_root() / _FILE
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dict(list(known.items())[-_KEPT:])), "utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def recall(settings: Settings) -> Present | None:
    """What the settings come to, as a command found it with these very files; None where none
    did, and where the model isn't there."""
    from engine.library import resolve

    try:
        folder = resolve(settings.model, settings.models_dir)
        found = _read()[_name(settings, folder)]
        return Present(KVSpec(**found["spec"]), tuple(map(int, found["context"])))
    except (CacheblendError, OSError, ValueError, TypeError, KeyError):
        return None


def _name(settings: Settings, folder: Path) -> str:
    """Of the settings and the model's files as they are: another size or time is another name."""
    files = []
    for path in sorted(path for pattern in _MODEL_FILES for path in folder.glob(pattern)):
        status = path.stat()
        files.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    chosen = [(name, str(getattr(settings, name, None))) for name in _NAMES]
    facts = (str(folder.resolve()), files, chosen, platform.node())
    return blake3(json.dumps(facts).encode()).hexdigest()


def _read() -> dict[str, Any]:
    try:
        known = json.loads((data_root() / _FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
