"""What `bench` is asked for, read and checked before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cache_store.errors import NotFoundError, UsageError
from cbcli.output import Output
from engine.kinds import parse_size

if TYPE_CHECKING:
    from engine.bench.load import Bandwidth


def check_files(
    out: Output, csv: str | None, plot: Path | None = None, formats: Sequence[str] | None = None
) -> None:
    """Refuses, before anything is measured, what could not be written afterwards.

    formats: endings a picture's name may have, those of `bench_plot` unless given.
    """
    if csv == "-" and out.json:
        raise UsageError("--json and --csv - both want standard output", "give --csv a file")
    for flag, path in (("--csv", None if csv in (None, "-") else Path(str(csv))), ("--plot", plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: there is no such folder", "make it first")
    if plot is not None:
        from cbcli.bench_plot import FORMATS, check_plot

        check_plot(plot, formats or FORMATS)


def check_peers(names: Sequence[str], gguf: Path | None) -> None:
    """Refuses peers that could not be started, or not be told apart."""
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--peer {name} was given twice", "give each peer once")
    if "llamacpp" in names and gguf is None:
        raise UsageError(
            "--peer llamacpp needs the model's weights as GGUF", "name them: --gguf FILE"
        )
    if gguf is not None and not gguf.is_file():
        raise NotFoundError(f"--gguf {gguf}: there is no such file")


def read_text(path: Path) -> str:
    """The file of --text; what is no UTF-8 in it does no harm."""
    if not path.is_file():
        raise NotFoundError(f"--text {path}: there is no such file")
    return path.read_bytes().decode("utf-8", "replace")


def listed(flag: str, text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list, each once."""
    items = tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    if not items:
        raise UsageError(f"{flag}: nothing was given", "separate values by commas")
    return items


def wholes(
    flag: str, text: str, what: str = "number of tokens", example: str = "1024,4096"
) -> tuple[int, ...]:
    """Whole numbers, of tokens unless `what` says otherwise, the smallest first."""
    items = listed(flag, text)
    for item in items:
        if not (item.isascii() and item.isdecimal() and len(item) < 10):
            raise UsageError(f"{flag}: {item!r} is no {what}", f"such as {example}")
    return tuple(sorted({int(item) for item in items}))


def parse_bandwidth(text: str) -> Bandwidth:
    """Bytes a second; None for no limit; "balanced"."""
    if text == "unlimited":
        return None
    if text == "balanced":
        return "balanced"
    try:
        rate = parse_size(text.removesuffix("/s"))
    except ValueError:
        rate = 0
    if rate <= 0:
        raise UsageError(f"--bandwidth {text}: no rate", "such as 500MB/s, unlimited or balanced")
    return rate
