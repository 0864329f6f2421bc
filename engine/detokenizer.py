"""Token ids to bytes and text, as they arrive."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class StreamDecoder:
    """Turns ids into text as they arrive; never shows part of a character.

    The joined results of `push` and `finish` equal `Tokenizer.decode` of all ids. Each push costs
    the length of its own piece, not of what came before.
    """

    def __init__(self, pieces: Pieces, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        # Holds back an incomplete sequence; shows U+FFFD only once bytes are certainly wrong.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = pieces.strip_first_space
        self._previous: int | None = None

    def push(self, token: int) -> str:
        """Take one id; returns the text that is now safe to show."""
        if token in self._skip:
            return ""
        raw = self._pieces.piece(token, self._previous)
        self._previous = token
        return self._trimmed(self._utf8.decode(raw))

    def finish(self) -> str:
        """No more ids: an unfinished character shows as U+FFFD."""
        return self._trimmed(self._utf8.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        # A sentencepiece text starts with a space that is not part of it.
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


@dataclass(frozen=True)
class Pieces:
    """The bytes each id stands for. `kind` is "bytes" (byte-level), "space" (sentencepiece) or
    "other" (asked of the library, one token of context)."""

    template: tokenizers.Tokenizer
    kind: str
    byte_fallback: bool
    strip_first_space: bool
    byte_of: Mapping[str, int]

    @classmethod
    def of(cls, template: tokenizers.Tokenizer, decoder: object) -> Pieces:
        steps = {str(step.get("type")): step for step in _steps(decoder)}
        kind = "other"
        if "ByteLevel" in steps:
            kind = "bytes"
        elif steps.keys() & {"ByteFallback", "Metaspace"}:
            kind = "space"
        metaspace = steps.get("Metaspace")
        strip = metaspace is not None and (
            metaspace.get("prepend_scheme", "always") != "never"
            and metaspace.get("add_prefix_space", True) is not False
        )
        trim = steps.get("Strip", {})
        strip = strip or (trim.get("content") == " " and bool(trim.get("start")))
        return cls(
            template=template,
            kind=kind,
            byte_fallback="ByteFallback" in steps,
            strip_first_space=kind == "space" and strip,
            byte_of=_byte_of_char() if kind == "bytes" else {},
        )

    def piece(self, token: int, previous: int | None) -> bytes:
        text = self.template.id_to_token(token) if token >= 0 else None
        if text is None:  # a padding row of the model's embedding, no token
            return b""
        if self.kind == "bytes":
            try:
                return bytes([self.byte_of[char] for char in text])
            except KeyError:  # an added token, spelt as it is
                return text.encode("utf-8", "replace")
        if self.kind == "space":
            byte = _BYTE_TOKEN.fullmatch(text) if self.byte_fallback else None
            if byte:
                return bytes([int(byte[1], 16)])
            return text.replace("▁", " ").encode("utf-8", "replace")
        context = [] if previous is None else [previous]
        before = self.template.decode(context, skip_special_tokens=False) if context else ""
        both = self.template.decode([*context, token], skip_special_tokens=False)
        return both.removeprefix(before).encode("utf-8", "replace")


def _steps(part: object) -> list[dict[str, Any]]:
    """A decoder's steps, sequences flattened."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [step for inner in part.get("decoders") or [] for step in _steps(inner)]
    return [part]


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
