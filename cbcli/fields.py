"""Fields of the records of `cbcli.records`, as the tables of all lists show them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cache_store.catalog import Place
from cbcli.listing import Field, Listing
from cbcli.session import shown_source
from cbcli.text import one_line, shorten
from cbcli.units import count_text, size_text

SHOWN_DIGITS = 12
BEGINNING = 48  # columns of a chunk's text in a list


def beginning(text: str) -> str:
    """Of a chunk's text, on one line."""
    return shorten(" ".join(one_line(text).split()), BEGINNING)


def place_text(place: Mapping[str, Any] | None) -> str:
    """ "pages 3-4", of a place's record."""
    return "" if place is None else str(Place(**place))


def moment_text(seconds: float) -> str:
    """A time of day, here."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def size_or_none(size: int | None) -> str:
    return "" if size is None else size_text(size)


def count_or_none(count: int | None) -> str:
    return "" if count is None else count_text(count)


CHUNK_ID = Field("chunk_id", "chunk", lambda value: value[:SHOWN_DIGITS])
SOURCE = Field("source", show=shown_source)
HEADINGS = Field("headings", show=" > ".join, column=False)
POSITION = (
    Field("ordinal", right=True, column=False),
    Field("start", right=True, column=False),
    Field("end", right=True, column=False),
    Field("place", show=place_text, column=False),
    HEADINGS,
)
TOKENS = Field("tokens", show=count_text, right=True)
BYTES = Field("bytes", "size", size_or_none, right=True)
TEXT = Field("text", show=beginning)

CUT_CHUNKS = Listing("chunks", "chunk_id", (CHUNK_ID, SOURCE, *POSITION, TOKENS, BYTES, TEXT))
"""Chunks that were cut and are in no store."""
