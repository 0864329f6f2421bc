"""The folder of models: names, places, and putting a finished model in place whole.

    <models_dir>/<name>/                a model, in the Hugging Face layout
    <models_dir>/.work/<name>.lock      held while a model of that name is being made
    <models_dir>/.work/<name>-<key>/    what is being made; renamed into place when it is complete

A crash leaves at most something below `.work`, which the next pull of that name clears or resumes.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from cache_store.errors import NotFoundError, UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_WORK = ".work"


def valid_name(name: str) -> str:
    """`name`, where it can be the name of a model. Raises UsageError."""
    # The names a Windows file system keeps for itself would be unusable there.
    reserved = re.fullmatch(r"(?i)(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", name)
    if not _NAME.fullmatch(name) or name.endswith(".") or reserved:
        raise UsageError(
            f"{name!r} cannot be a model's name",
            "use up to 96 letters, digits, dots, dashes and underscores, a letter or digit first",
        )
    return name


def model_dir(models_dir: Path, name: str) -> Path:
    """Where a model of that name is, or would be. Raises UsageError for a bad name."""
    return models_dir / valid_name(name)


def model_names(models_dir: Path) -> list[str]:
    """The names of the models in the library, sorted."""
    try:
        found = [entry.name for entry in models_dir.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(name for name in found if _NAME.fullmatch(name))


@contextmanager
def locked(models_dir: Path, name: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the name for this process; `waiting` is called once where another one has it."""
    work = models_dir / _WORK
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work / f"{valid_name(name)}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def work_dir(models_dir: Path, name: str, source: str, *, resume: bool) -> Path:
    """An existing folder to make the model in; call it with the name locked.

    What earlier, unfinished pulls of that name left is removed, but for a pull of the same
    `source` where that can be resumed.
    """
    work = models_dir / _WORK
    place = work / f"{name}-{blake3(source.encode()).hexdigest(8)}"
    for left in work.glob(f"{name}-*"):
        if re.fullmatch(r"[0-9a-f]{16}", left.name.removeprefix(f"{name}-")) and not (
            resume and left == place
        ):
            shutil.rmtree(left)
    place.mkdir(exist_ok=True)
    return place


def put_in_place(made: Path, models_dir: Path, name: str) -> Path:
    """Move the finished folder `made` to its name. What is on disk survives a power cut."""
    for file in made.iterdir():
        _sync(file)
    _sync(made)
    target = model_dir(models_dir, name)
    made.rename(target)
    _sync(models_dir)
    return target


def take_away(models_dir: Path, name: str) -> None:
    """Remove a model: out of sight in one step, then file by file. Raises NotFoundError."""
    target = model_dir(models_dir, name)
    missing = NotFoundError(f"no model {name!r} in {models_dir}")
    if not target.is_dir():
        raise missing
    with locked(models_dir, name, lambda: None):
        doomed = work_dir(models_dir, name, "removed", resume=False)
        try:
            target.rename(doomed / name)
        except FileNotFoundError:
            raise missing from None
        finally:
            shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
