"""Is a folder a whole model in the Hugging Face layout, and one that can be computed here?"""

from __future__ import annotations

import json
import math
import re
import struct
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from cache_store.errors import IntegrityError, UsageError
from engine.config import ModelConfig, load_config
from engine.library.manifest import MANIFEST

# What a model consists of; everything else in a folder or repository is left where it is.
KEPT = ("*.safetensors", "*.json", "*.jinja", "LICENSE*", "LICENCE*", "NOTICE*", "README.md")
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100 << 20


def is_kept(name: str) -> bool:
    """Whether a file of that name, at the top of a model's folder, belongs to the model."""
    plain = "/" not in name and "\\" not in name and name != MANIFEST
    return plain and any(fnmatch(name, pattern) for pattern in KEPT)


def require(names: set[str], where: str) -> None:
    """Raise UsageError unless files of these `names` can be a whole model."""
    hint = "only models in the Hugging Face layout with safetensors weights can be used"
    if "config.json" not in names:
        raise UsageError(f"{where}: no config.json", hint)
    if not any(name.endswith(".safetensors") for name in names):
        others = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf")))
        found = f", only {others[0]}" if others else ""
        raise UsageError(f"{where}: no safetensors weights{found}", hint)
    if "tokenizer.json" not in names:
        raise UsageError(
            f"{where}: no tokenizer.json",
            "save the model's fast tokenizer there with transformers, then pull the folder",
        )


def check_layout(model: Path) -> ModelConfig:
    """The configuration of a whole model.

    Raises UsageError where something is missing or the model can't be computed here,
    IntegrityError where a weights file is cut short or is none.
    """
    require({path.name for path in model.iterdir()}, str(model))
    config = load_config(model)
    for name in weight_files(model):
        parameters_of(model / name)
    return config


def weight_files(model: Path) -> list[str]:
    """The names of the weights files a model needs. Raises IntegrityError for a bad index."""
    index = model / INDEX
    if (model / "model.safetensors").is_file() or not index.is_file():
        return sorted(path.name for path in model.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise IntegrityError(f"{index} is damaged ({error})", "get the model again") from None
    for name in names:
        if not isinstance(name, str) or not is_kept(name) or not (model / name).is_file():
            raise IntegrityError(
                f"{model}: {name}, which {INDEX} names, is missing", "get the model again"
            )
    return names


def parameters_of(weights: Path) -> int:
    """How many numbers a safetensors file holds, from its header, the file's size checked by it.

    Raises IntegrityError where the file is cut short or isn't one.
    """
    size = weights.stat().st_size
    try:
        with weights.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _LARGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        tensors = [value for name, value in header.items() if name != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        count = sum(math.prod(tensor["shape"]) for tensor in tensors)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise IntegrityError(
            f"{weights} is not a safetensors file ({error})", "get the model again"
        ) from None
    if size != 8 + length + end:
        raise IntegrityError(
            f"{weights} has {size} bytes instead of {8 + length + end}", "get the model again"
        )
    return int(count)


def licence_of(model: Path) -> str:
    """The licence that a model's README states, or where it is, or ""."""
    try:
        text = (model / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    front = re.match(r"\s*---\n(.*?)\n---", text, re.DOTALL)
    stated = re.search(r"^license:\s*['\"]?([\w.+-]+)", front[1], re.MULTILINE) if front else None
    if stated:
        return stated[1]
    files = sorted(p.name for p in model.iterdir() if fnmatch(p.name.upper(), "LICEN[SC]E*"))
    return f"see {files[0]}" if files else ""
