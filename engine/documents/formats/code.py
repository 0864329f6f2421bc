"""Programs and settings files: as they are, with their language and lines."""

from engine.documents.content import Content, Converted
from engine.documents.document import Mark
from engine.documents.languages import language_of

_MARKED_LINES = 100_000


def read(content: Content) -> Converted:
    text = content.text
    language = language_of(content.name, text)
    form = f"code:{language}" if language else "text"
    return Converted(text, form, line_marks(text), content.decoded.notes)


def line_marks(text: str) -> tuple[Mark, ...]:
    """A mark where each line begins; none for a text of very many lines, which is no program."""
    if text.count("\n") > _MARKED_LINES:
        return ()
    marks, start = [], 0
    for number, line in enumerate(text.split("\n"), 1):
        if start < len(text):
            marks.append(Mark(start, "line", number))
        start += len(line) + 1
    return tuple(marks)
