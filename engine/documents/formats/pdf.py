"""PDF: the text of its pages, by PDFium."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from engine.documents.content import Content, Converted, Unconvertible
from engine.documents.document import Mark
from engine.documents.page_layout import (
    Page,
    Run,
    lines_of,
    paragraphs,
)
from engine.documents.running_titles import without_running_titles

MAX_PAGES = 50_000
MAX_CHARS = 256 * 2**20
_HYPHEN = "\x02"  # PDFium's, where a word is parted at a line's end
_BREAK = re.compile("[\r\n\x02]+")
_UNKNOWN = re.compile("[\0\ufffd\ue000-\uf8ff]")
_FIXED = re.compile(rb"courier|mono|consol|typewriter|cmtt", re.I)
_LEADER = re.compile(r"\s*(?:\.\s*){5,}")  # dots from an entry to its page
_WIDE_GAP = 1.3  # times the font's height


def read(content: Content) -> Converted:
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(content.raw)
    except pypdfium2.PdfiumError as error:
        # PDFium's number of an error may be that of an earlier file.
        if b"/Encrypt" in content.raw and re.search("password|security", str(error), re.I):
            raise Unconvertible("is encrypted; save it without its password") from None
        raise Unconvertible("is damaged, or a PDF without pages: it can't be opened") from None
    try:
        return _converted(pdf)
    finally:
        pdf.close()


def _converted(pdf: Any) -> Converted:
    count = len(pdf)
    if count == 0:
        raise Unconvertible("is a PDF without pages")
    if count > MAX_PAGES:
        raise Unconvertible(f"has {count} pages, more than {MAX_PAGES}; split it")
    is_form = pdf.get_formtype() != 0
    if is_form:
        pdf.init_forms()  # fields that have no looks yet get some
    pages: list[Page] = []
    damaged = without = unknown = chars = 0
    for number in range(1, count + 1):
        try:
            page, has_content = _page(pdf, number, is_form)
        except Exception:  # pypdfium2's own kind, or what broken numbers make of it
            damaged += 1
            continue
        pages.append(page)
        text = "".join(line.text for line in page.lines)
        chars += len(text)
        if chars > MAX_CHARS:
            raise Unconvertible(f"has more than {MAX_CHARS // 2**20} million letters; split it")
        without += has_content and not text.strip()
        unknown += len(_UNKNOWN.findall(text)) > 0.3 * len(text) > 0
    if not chars:
        if damaged == count:
            raise Unconvertible("is damaged: none of its pages can be read")
        raise Unconvertible("has no text, as scans have none; run it through OCR first")
    text, places, headings = paragraphs(without_running_titles(pages))
    marks = tuple(Mark(start, "page", number) for start, number in places)
    told = ((damaged, "can't be read"), (without, "no text"), (unknown, "text without letters"))
    notes = tuple(_note(pages_so, count, what) for pages_so, what in told if pages_so)
    return Converted(text, "markdown" if headings else "text", marks, notes)


def _note(pages: int, count: int, what: str) -> str:
    whole = f"{pages} of {count} page{'s' * (count != 1)}"
    if what.startswith("can't"):
        return f"{whole} {what}"
    return f"{whole} {'has' if pages == 1 else 'have'} {what}"


def _page(pdf: Any, number: int, is_form: bool) -> tuple[Page, bool]:
    """A page, and whether anything is drawn on it."""
    import pypdfium2.raw as pdfium

    page = pdf[number - 1]
    if is_form and pdfium.FPDFPage_GetAnnotCount(page) > 0:
        pdfium.FPDFPage_Flatten(page, pdfium.FLAT_NORMALDISPLAY)  # what was filled in becomes text
        page.close()
        page = pdf[number - 1]
    try:
        text_page = page.get_textpage()
        try:
            runs, turn = _runs(text_page)
            bottom, top = _ends(page.get_bbox(), turn)
            has_content = bool(runs) or pdfium.FPDFPage_CountObjects(page) > 0
        finally:
            text_page.close()
        return Page(number, top, bottom, lines_of(runs)), has_content
    finally:
        page.close()


def _ends(box: tuple[float, float, float, float], turn: int) -> tuple[float, float]:
    """Bottom and top of a page, as its text is turned."""
    left, bottom, right, top = box
    return ((bottom, top), (-right, -left), (-top, -bottom), (left, right))[turn]


def _runs(text_page: Any) -> tuple[list[Run], int]:
    """The runs of a page, in the order they were written; and how often a quarter to the left its
    text is turned."""
    text = _text(text_page)
    lines, start = [], 0
    for found in [*_BREAK.finditer(text), None]:
        end = found.start() if found else len(text)
        hyphen = "-" if found and _HYPHEN in found[0] else ""
        lines.append((start, end, hyphen))
        start = found.end() if found else end
    box = _Boxes(text_page)
    box.turn = _turn(box, [(start, end) for start, end, _ in lines if end - start > 3])
    runs = [
        run for start, end, hyphen in lines for run in _line_runs(text, start, end, hyphen, box)
    ]
    return runs, box.turn


def _turn(box: _Boxes, lines: list[tuple[int, int]]) -> int:
    """How most of a page's lines are turned, by the first of them."""
    turns: Counter[int] = Counter()
    for start, end in lines[:9]:
        (x0, y0), (x1, y1) = box.origin(start), box.origin(end - 1)
        across, up = x1 - x0, y1 - y0
        turns[(1 if up > 0 else 3) if abs(up) > abs(across) else (0 if across >= 0 else 2)] += 1
    return turns.most_common(1)[0][0] if turns else 0


def _line_runs(text: str, start: int, end: int, hyphen: str, box: _Boxes) -> Iterator[Run]:
    """One printed line, cut where there is a wide gap."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    if start == end:
        return
    # Of five letters the second largest: bullets and other fonts among them are smaller.
    places = (start, (3 * start + end) // 4, (start + end) // 2, (start + 3 * end) // 4, end - 1)
    size = sorted(map(box.height, places))[-2]
    begin = place = start
    while True:
        space = text.find(" ", place, end)
        if space < 0:
            break
        place = space + 1
        while place < end and text[place] == " ":
            place += 1
        if box.left(place) - box.right(space - 1) > _WIDE_GAP * size:
            yield _run(text[begin:space], begin, space - 1, size, box)
            begin = place
    yield _run(text[begin:end] + hyphen, begin, end - 1, size, box)


def _run(text: str, first: int, last: int, size: float, box: _Boxes) -> Run:
    clean = _LEADER.sub(" … ", " ".join(text.replace("\0", "\ufffd").split()))
    places = (box.left(first), box.right(last), box.baseline(first))
    return Run(clean, *places, size, box.is_fixed(first) and box.is_fixed(last))


def _text(text_page: Any) -> str:
    """The page's characters, one for each of PDFium's, so that places in both are the same."""
    import pypdfium2.raw as pdfium

    count = text_page.count_chars()
    if count <= 0:
        return ""
    buffer = (ctypes.c_ushort * (count + 1))()
    written = pdfium.FPDFText_GetText(text_page, 0, count, buffer) - 1
    if written == count:
        units = bytes(buffer)[: 2 * count]
        text = units.decode("utf-16-le", "replace")
        if len(text) == count:  # no character is two units
            return text.replace("\ufffe", _HYPHEN)
    codes = (pdfium.FPDFText_GetUnicode(text_page, place) for place in range(count))
    return "".join(chr(code) if code < 0x110000 else "\ufffd" for code in codes)


class _Boxes:
    """Where a page's characters stand, with the page turned so that its text is level. turn: how
    often a quarter to the left the text is turned on the page."""

    def __init__(self, text_page: Any) -> None:
        import pypdfium2.raw as pdfium

        self.turn = 0
        self._page = text_page
        self._box = pdfium.FPDFText_GetCharBox
        self._loose = pdfium.FPDFText_GetLooseCharBox
        self._origin = pdfium.FPDFText_GetCharOrigin
        self._font = pdfium.FPDFText_GetFontInfo
        self._rect = pdfium.FS_RECTF()
        self._flags = ctypes.c_int()
        self._name = ctypes.create_string_buffer(64)
        self._numbers = [ctypes.c_double() for _ in range(4)]
        self._pointers = [ctypes.byref(number) for number in self._numbers]

    def left(self, place: int) -> float:
        return self._edges(place)[0]

    def right(self, place: int) -> float:
        return self._edges(place)[1]

    def _edges(self, place: int) -> tuple[float, float]:
        self._box(self._page, place, *self._pointers)
        left, right, bottom, top = (number.value for number in self._numbers)
        return ((left, right), (bottom, top), (-right, -left), (-top, -bottom))[self.turn]

    def origin(self, place: int) -> tuple[float, float]:
        """On the page as it is."""
        self._origin(self._page, place, *self._pointers[:2])
        return self._numbers[0].value, self._numbers[1].value

    def baseline(self, place: int) -> float:
        x, y = self.origin(place)
        return (y, -x, -y, x)[self.turn]

    def height(self, place: int) -> float:
        """Of the font, at least a point."""
        self._loose(self._page, place, ctypes.byref(self._rect))
        rect = self._rect
        height = rect.right - rect.left if self.turn % 2 else rect.top - rect.bottom
        return float(max(1.0, height))

    def is_fixed(self, place: int) -> bool:
        """Whether all letters of its font are of one width, as in programs."""
        size = len(self._name)
        self._font(self._page, place, self._name, size, ctypes.byref(self._flags))
        return bool(self._flags.value & 1 or _FIXED.search(self._name.value))
