"""Lines to show: spans of text, each with roles that a theme gives colours to. Never markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from cbcli.text import one_line

BLOCKS = " ▏▎▍▌▋▊▉█"
COLUMNS = " ▁▂▃▄▅▆▇█"


class Span(NamedTuple):
    """text: harmless, on one line; role: words a theme knows, apart from each other by spaces."""

    text: str
    role: str = ""


Line = tuple[Span, ...]
EMPTY: Line = ()


def line(*parts: str | Span) -> Line:
    """A line of spans and plain texts, which are made harmless."""
    return tuple(part if isinstance(part, Span) else Span(safe(part)) for part in parts)


def safe(text: str, limit: int = 10_000) -> str:
    """`text` on one line, nothing in it obeyed by a terminal; what has no width shown as ·."""
    shown = one_line(text[:limit])
    return shown if shown.isascii() else "".join(map(_steady, shown))


def _steady(char: str) -> str:
    from cbcli.inspect.cells import steady

    return steady(char)


def span(text: str, role: str = "") -> Span:
    """A span of text from anywhere."""
    return Span(safe(text), role)


def text_of(shown: Line) -> str:
    return "".join(part.text for part in shown)


def width_of(shown: Line) -> int:
    return sum(cell_len(part.text) for part in shown)


def fit(shown: Line, columns: int, role: str = "") -> Line:
    """The line cut, with an ellipsis, or filled to `columns` cells exactly."""
    wide = width_of(shown)
    if wide <= columns:
        return (*shown, Span(" " * (columns - wide), role)) if wide < columns else shown
    kept: list[Span] = []
    left = columns - 1
    for part in shown:
        size = cell_len(part.text)
        if size > left:
            kept.append(Span(set_cell_size(part.text, left).rstrip() + "…", part.role))
            break
        kept.append(part)
        left -= size
    return fit(tuple(kept), columns, role) if columns > 0 else EMPTY


def in_ascii(text: str) -> str:
    """`text` with ~ for an ellipsis and a ? for each cell of what else isn't ASCII."""
    if text.isascii():
        return text
    return "".join("~" if c == "…" else c if c.isascii() else "?" * cell_len(c) for c in text)


def right(text: str, columns: int) -> str:
    """`text` moved to the right of `columns` cells."""
    return " " * max(0, columns - cell_len(text)) + text


def left(text: str, columns: int) -> str:
    """`text` cut or filled to `columns` cells."""
    if cell_len(text) > columns:
        return set_cell_size(text, max(0, columns - 1)) + "…" if columns else ""
    return set_cell_size(text, columns)


def bar(share: float, columns: int, ascii: bool = False) -> str:
    """A bar that takes `share` of `columns`, to an eighth of a cell."""
    share = min(1.0, max(0.0, share))
    if ascii:
        return "#" * round(share * columns)
    eighths = round(share * columns * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (BLOCKS[rest] if rest else "")


def wrap(text: str, columns: int) -> list[str]:
    """`text` in lines of at most `columns` cells, cut at spaces where there are any."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        current = ""
        for word in safe(paragraph, len(paragraph)).split(" "):
            while True:
                joined = f"{current} {word}" if current else word
                if cell_len(joined) <= columns:
                    current = joined
                    break
                if current:
                    lines.append(current)
                    current = ""
                    continue
                head = set_cell_size(word, columns).rstrip() or word[:1]
                lines.append(head)
                word = word[len(head) :]
        lines.append(current)
    return lines


def table(
    headers: Sequence[str], rows: Iterable[Sequence[str | Span]], align: str = "", gap: int = 2
) -> list[Line]:
    """Columns aligned: `align` has an l or r for each of them."""
    laid = [[c if isinstance(c, Span) else span(c) for c in row] for row in rows]
    heads = [Span(safe(head), "dim") for head in headers]
    sizes = [max(cell_len(row[i].text) for row in (heads, *laid)) for i in range(len(heads))]
    shown: list[Line] = []
    for row in (heads, *laid):
        parts: list[Span] = []
        for number, (cell, size) in enumerate(zip(row, sizes, strict=True)):
            pad = " " * (size - cell_len(cell.text))
            moved = align[number : number + 1] == "r"
            parts += [Span(pad), cell] if moved else [cell, Span(pad)]
            parts.append(Span(" " * gap))
        shown.append(tuple(part for part in parts[:-1] if part.text))
    return shown
