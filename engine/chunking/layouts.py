"""The layout of each form of text."""

from __future__ import annotations

from engine.chunking.layout import Layout
from engine.chunking.prose import Prose


def layout_of(form: str, text: str) -> Layout:
    """form: as in `Document`; one that is not known is cut as text."""
    return Prose(text)
