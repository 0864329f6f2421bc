"""The layout of each form of text."""

from __future__ import annotations

from engine.chunking import code, markdown
from engine.chunking.layout import Layout
from engine.chunking.outline import NONE, TABLE, TOP, Outline
from engine.chunking.prose import Prose
from engine.chunking.structured import Structured


def layout_of(form: str, text: str) -> Layout:
    """form: as in `Document`; one that is not known is cut as text."""
    if form == "markdown":
        return Structured(text, markdown.outline_of(text), markdown.title_of)
    if form == "rows":
        return Structured(text, _rows(text))
    name, _, language = form.partition(":")
    if name == "code":
        return Structured(text, code.outline_of(text, language.lower()))
    return Prose(text)


def _rows(text: str) -> Outline:
    """One table, its header the first line."""
    outline = Outline(len(text))
    table = outline.add(0, TABLE, NONE, TOP)
    outline.heads[table] = text.find("\n") + 1 or len(text)
    return outline
