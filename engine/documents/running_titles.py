"""What is printed at the edge of each page and is no part of the text: running titles, page
numbers. A line is taken away only where nothing speaks for its being text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from engine.documents.page_layout import Line, Page

_MARGIN = 0.12  # share of a page's height, at its top and at its bottom, where running titles are
_FEWEST = 3  # pages
_OF_ONE_SIDE = 0.75  # of a book's left or right pages
_LONGEST = 100  # characters
_NUMBER = re.compile(r"(?<![\w.])(?:\d{1,6}|[ivxl]{1,8})(?!\w)", re.I)
_ONLY_NUMBER = re.compile(
    r"[^\w#]*(?:page|p|pg|seite|s|página|pagina|pág|стр)?[^\w#]*#"
    r"\s*(?:(?:of|von|de|sur|di|из|/)\s*(\d{1,6}))?[^\w#]*"
)
_APART = re.compile(r"^#\s*[|·•]|[|·•]\s*#$")
_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50}


@dataclass(frozen=True)
class _Key:
    """What a line is known by. place: its height on the page, roughly; shift: how much higher than
    the page's place in the file the number is that stands for `#` in the text."""

    text: str
    place: int
    shift: int | None = None

    def is_number(self, pages: int) -> bool:
        """Whether it is a page's number, of at least `pages`, and nothing else."""
        found = _ONLY_NUMBER.fullmatch(self.text) if self.shift is not None else None
        return bool(found and int(found[1] or pages) >= pages)


def without_running_titles(pages: Sequence[Page]) -> list[Page]:
    """The pages without the outermost lines that are the same on most of them (of a book, on most
    of the left or of the right ones), or are the page's number; none that is printed larger than
    the text. The first page that has one keeps it, if it is more than a number."""
    body = _body_size(pages)
    counts: Counter[_Key] = Counter()
    on_side: Counter[tuple[_Key, bool]] = Counter()
    for page in pages:
        keys = {key for line in page.lines for key in _keys(page, line, body, len(pages))}
        counts.update(keys)
        on_side.update((key, page.number % 2 == 0) for key in keys)
    written = sum(bool(page.lines) for page in pages)
    sides = Counter(page.number % 2 == 0 for page in pages if page.lines)
    running = {key for key, count in counts.items() if count > max(_FEWEST - 1, written / 2)}
    running |= {
        key for key, count in counts.items() if count >= _FEWEST and key.is_number(len(pages))
    }
    running |= {
        key
        for (key, side), count in on_side.items()
        if count >= max(_FEWEST, _OF_ONE_SIDE * sides[side])
    }
    kept, seen = [], set[_Key]()
    for page in pages:
        away = set()
        for line, key in _outermost(page, (body, len(pages)), running):
            if key in seen or key.is_number(len(pages)):
                away.add(line)
            seen.add(key)
        lines = tuple(line for line in page.lines if line not in away)
        kept.append(Page(page.number, page.top, page.bottom, lines))
    return kept


def _outermost(
    page: Page, facts: tuple[int, int], running: Collection[_Key]
) -> Iterator[tuple[Line, _Key]]:
    """Running lines from the page's top and from its bottom, as far as nothing else is between
    them and the edge. facts: what `_keys` takes."""
    middle = (page.top + page.bottom) / 2
    upper = sorted((line for line in page.lines if line.y > middle), key=lambda line: -line.y)
    lower = sorted((line for line in page.lines if line.y <= middle), key=lambda line: line.y)
    for lines in (upper, lower):
        for line in lines:
            key = next((key for key in _keys(page, line, *facts) if key in running), None)
            if key is None:
                break
            yield line, key


def _keys(page: Page, line: Line, body: int, pages: int) -> Iterator[_Key]:
    """What a line at a page's edge may be known by on other pages; nothing for one inside the
    page, or of larger print than `body`."""
    height = page.top - page.bottom
    inside = page.bottom + _MARGIN * height < line.y < page.top - _MARGIN * height
    if inside or round(line.size) > body or len(line.text) > _LONGEST:
        return
    place = round((line.y - page.bottom) / 4)
    yield _Key(line.text.lower(), place)
    for found in _NUMBER.finditer(line.text):
        text = f"{line.text[: found.start()]}#{line.text[found.end() :]}".lower()
        key = _Key(text, place, _value(found[0].lower()) - page.number)
        if key.is_number(pages) or _stands_apart(line, text):
            yield key


def _stands_apart(line: Line, text: str) -> bool:
    """Whether the number is parted from the words, as no number of a chapter is: by a sign, or
    by most of the line."""
    if not (text.startswith("#") or text.endswith("#")):
        return False
    written = 0.6 * line.size * len(line.text)
    return bool(_APART.search(text)) or (line.parts == 2 and line.x1 - line.x0 > 2 * written)


def _value(number: str) -> int:
    if number.isdecimal():
        return int(number)
    values = [_ROMAN[letter] for letter in number]
    return sum(-a if a < b else a for a, b in zip(values, [*values[1:], 0], strict=True))


def _body_size(pages: Sequence[Page]) -> int:
    """Of most of the text, in points."""
    sizes: Counter[int] = Counter()
    for page in pages:
        for line in page.lines:
            sizes[round(line.size)] += len(line.text)
    return sizes.most_common(1)[0][0] if sizes else 0
