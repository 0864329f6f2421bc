"""What an answer cites: its numbers in brackets, checked against the chunks that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cache_store.catalog import ChunkInfo
from cbcli.output import Output
from cbcli.records import place_record
from cbcli.session import shown_source
from engine.citations import Mention, mentions, spans


@dataclass(frozen=True)
class Citations:
    """Chunks under their numbers in a prompt, and the mentions of the answer to it. Nothing is
    cited that the model didn't write."""

    chunks: tuple[tuple[int, ChunkInfo], ...]
    found: tuple[Mention, ...]

    @classmethod
    def of(cls, answer: str, chunks: Sequence[tuple[int, ChunkInfo]]) -> Citations:
        return cls(tuple(chunks), mentions(answer))

    @property
    def unknown(self) -> list[int]:
        """Numbers that no chunk has, in order of mention."""
        known = {number for number, _ in self.chunks}
        return list(dict.fromkeys(m.number for m in self.found if m.number not in known))

    def cited(self) -> list[tuple[int, ChunkInfo]]:
        """The chunks that are mentioned, by number."""
        named = {mention.number for mention in self.found}
        return sorted((n, chunk) for n, chunk in self.chunks if n in named)

    def to_json(self) -> dict[str, Any]:
        """`citations`, one a chunk, and `unknown_citations`; spans are in characters of the
        answer."""
        return {
            "citations": [
                {
                    "number": number,
                    "chunk_id": chunk.chunk_id,
                    "source": chunk.source or None,
                    "place": place_record(chunk.place),
                    "headings": list(chunk.headings),
                    "cited": bool(spans(self.found, number)),
                    "spans": [list(span) for span in spans(self.found, number)],
                }
                for number, chunk in self.chunks
            ],
            "unknown_citations": [
                {"number": number, "spans": [list(span) for span in spans(self.found, number)]}
                for number in self.unknown
            ],
        }

    def print(self, out: Output) -> None:
        """What is cited, a line each, after the answer; and what is wrong with it."""
        cited = self.cited()
        if cited:
            out.line()
        for number, chunk in cited:
            out.line(f"[{number}] {where(chunk)}")
        if not cited:
            out.note("the answer cites none of the documents it was given")
        self.warn(out)

    def warn(self, out: Output) -> None:
        """Of numbers that no document has."""
        for number in self.unknown:
            out.warn(f"the answer cites [{number}], and no document of the prompt has that number")


def where(chunk: ChunkInfo) -> str:
    """A chunk's file and place in it, as people name them."""
    source = shown_source(chunk.source) if chunk.source else chunk.chunk_id[:12]
    return f"{source}, {chunk.place}" if chunk.place else source
