"""Programs and settings files: as they are, with their language and lines."""

from itertools import accumulate

from engine.documents.content import Content, Converted
from engine.documents.languages import language_of
from engine.documents.marks import Marks


def read(content: Content) -> Converted:
    text = content.text
    language = language_of(content.name, text)
    form = f"code:{language}" if language else "text"
    return Converted(text, form, _line_marks(text), content.decoded.notes)


def _line_marks(text: str) -> Marks:
    """A mark where each line begins."""
    starts = accumulate((len(line) + 1 for line in text.split("\n")), initial=0)
    return Marks("line", ((start, n) for n, start in enumerate(starts, 1) if start < len(text)))
