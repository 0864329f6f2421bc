"""`cacheblend-model.json`: where a model came from and what its files were when it was made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cache_store.errors import IntegrityError

MANIFEST = "cacheblend-model.json"
_FORMAT = 1
_BLOCK = 4 << 20

Progress = Callable[[str, int, int | None], None]
"""Called with a stage, the bytes done and the bytes there are, if that is known."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A `Progress` for nobody."""


@dataclass(frozen=True)
class FileRecord:
    """One file as it was: SHA-256 in hex, and bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """What is known of a model besides its files.

    `origin`: a catalogue name, `owner/name` on the Hugging Face Hub, or a path; `origin_kind` says
    which: catalogue, hub, directory or gguf. `revision`: the Hub's commit. `converted`: what a
    converted model was made from, and the versions of what made it. `terms`: where to read those
    that using the model is subject to.
    """

    origin: str
    origin_kind: str
    licence: str
    pulled_at: str
    files: Mapping[str, FileRecord]
    revision: str = ""
    converted: Mapping[str, str] = field(default_factory=dict)
    terms: str = ""


def write_manifest(model: Path, manifest: Manifest) -> None:
    """Put the manifest beside the model's files."""
    text = json.dumps({"format": _FORMAT, **asdict(manifest)}, indent=2, ensure_ascii=False)
    (model / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(model: Path) -> Manifest | None:
    """The manifest of a model, None where it has none. Raises IntegrityError for a damaged one."""
    path = model / MANIFEST
    try:
        raw: Any = json.loads(path.read_bytes())
        if raw["format"] != _FORMAT:
            raise IntegrityError(
                f"{path} has format {raw['format']}, {_FORMAT} is known here",
                "it was written by another version of cacheblend; get the model again",
            )
        files = {str(name): FileRecord(**record) for name, record in raw["files"].items()}
        fields = {key: value for key, value in raw.items() if key not in ("format", "files")}
        return Manifest(files=files, **fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is damaged ({error})", "get the model again") from None


def sha256_of(path: Path, progress: Callable[[int], None] = lambda step: None) -> str:
    """SHA-256 of a file in hex; `progress` gets the bytes of each step."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def record_files(model: Path, progress: Progress) -> dict[str, FileRecord]:
    """Records of all files in a model's folder but the manifest, by name."""
    paths = sorted(p for p in model.iterdir() if p.is_file() and p.name != MANIFEST)
    done, total = 0, sum(path.stat().st_size for path in paths)

    def step(size: int) -> None:
        nonlocal done
        done += size
        progress("hashing", done, total)

    return {path.name: FileRecord(sha256_of(path, step), path.stat().st_size) for path in paths}


def differences(model: Path, manifest: Manifest, progress: Progress) -> list[str]:
    """What is not as it was recorded, in words; empty for a sound model."""
    found = []
    present = {}
    for name, record in manifest.files.items():
        path = model / name
        if Path(name).name != name or not path.is_file():
            found.append(f"{name} is missing")
        elif (size := path.stat().st_size) != record.bytes:
            found.append(f"{name} has {size} bytes instead of {record.bytes}")
        else:
            present[name] = record
    done, total = 0, sum(record.bytes for record in present.values())

    def step(size: int) -> None:
        nonlocal done
        done += size
        progress("checking", done, total)

    for name, record in present.items():
        if sha256_of(model / name, step) != record.sha256:
            found.append(f"{name} has other content")
    return found
