"""A model's identity: what its weights and configuration are, whatever it is called."""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

from blake3 import blake3

from engine.config import ModelConfig
from engine.files import replace_file
from engine.weights import weight_files


def model_fingerprint(model_dir: Path, config: ModelConfig, memo: Path | None = None) -> str:
    """64 hex digits over the parsed configuration and every byte of the weights.

    Hashing reads the weights once; `memo` (a JSON file, made when missing) keeps the result for
    files whose size, inode and times have not changed since.
    """
    files = weight_files(model_dir)
    return _fingerprint(config, _file_digests(files, memo))


def known_fingerprint(model_dir: Path, config: ModelConfig, memo: Path) -> str | None:
    """The same, where `memo` has it; None where the weights would have to be read. Writes
    nothing."""
    kept = _read_memo(memo)
    digests = [kept.get(_identity(file)) for file in weight_files(model_dir)]
    found = [digest for digest in digests if digest is not None]
    return _fingerprint(config, found) if len(found) == len(digests) else None


def computed_facts(config: ModelConfig) -> dict[str, object]:
    """What of a configuration changes what is computed.

    Not what ends an answer, nor the declared type. A field that was added later, with a default,
    counts only where it is another: so the models there were keep their fingerprints.
    """
    plain = {field.name: field.default for field in fields(config)}
    return {
        name: value
        for name, value in asdict(config).items()
        if name not in ("eos_ids", "dtype") and value != plain[name]
    }


def _fingerprint(config: ModelConfig, digests: Iterable[str]) -> str:
    digest = blake3()
    digest.update(json.dumps(computed_facts(config), sort_keys=True).encode())
    for file_digest in digests:
        digest.update(bytes.fromhex(file_digest))
    return digest.hexdigest()


def _file_digests(files: Iterable[Path], memo: Path | None) -> list[str]:
    known = _read_memo(memo)
    digests, fresh = [], {}
    for file in files:
        identity = _identity(file)
        digest = known.get(identity)
        if digest is None:
            hasher = blake3(max_threads=blake3.AUTO)
            digest = hasher.update_mmap(str(file)).hexdigest()
            if _identity(file) == identity:  # not being written while it was read
                fresh[identity] = digest
        digests.append(digest)
    if fresh and memo is not None:
        _write_memo(memo, known | fresh)
    return digests


def _identity(file: Path) -> str:
    stat = file.stat()
    facts = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return f"{file.resolve()}|" + "|".join(map(str, facts))


def _read_memo(memo: Path | None) -> dict[str, str]:
    if memo is None:
        return {}
    try:
        known = json.loads(memo.read_text("utf-8"))
    except (OSError, ValueError):
        return {}  # a memo saves time only: without one everything is hashed
    valid = isinstance(known, dict)
    return {k: v for k, v in known.items() if _is_digest(v)} if valid else {}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _write_memo(memo: Path, known: dict[str, str]) -> None:
    with suppress(OSError):
        replace_file(memo, json.dumps(known))
