"""A line of input as a prompt: what it may hold, checked before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from cache_store.errors import CacheblendError, UsageError
from cbcli.command import nearest
from cbcli.lines.reader import MAX_LINE_BYTES, RawLine
from cbcli.settings import Origin, Settings, read_value
from engine.prompt_text import PromptText

# Settings that a line can have a value of its own for, under their own names.
OVERRIDES = (
    *(
        "collections",
        "top_k",
        "min_score",
        "with_neighbours",
        "order",
        "mode",
        "ratio",
        "policy",
        "threshold",
        "transfer",
        "check_layers",
    ),
    *("min_tokens", "save", "target_kl", "task"),
    *("strict_context", "system", "max_tokens", "temperature", "top_p", "sample_top_k", "seed"),
    *("stop", "cite"),
)
# All settings that an answer depends on, besides the line itself, what is stored and, where no
# policy or ratio is set, the model's calibration.
_DECIDING = (
    *("retriever", "embed_model"),
    *("model", "dtype", "kv_dtype", "force", "separator", "text_separator", "template_date"),
    *(name for name in OVERRIDES if name != "save"),
)
_KEYS = ("id", "question", "chunks", "prompt", *OVERRIDES)
_CHUNK_KEYS = ("id", "text", "source")
_FORMS = 'write {"question": …, "chunks": […]}, {"question": …} or {"prompt": …}'


@dataclass(frozen=True)
class LineName:
    """Which line it is. id: the line's own, or None; digest: of its text and of the settings that
    decide its answer."""

    number: int
    id: str | int | None
    digest: str


@dataclass(frozen=True)
class ChunkOfLine:
    """A chunk that a line gives: its text and what that is called, or the `name` of a stored one,
    an id or its beginning."""

    text: str = ""
    source: str = ""
    name: str = ""


@dataclass(frozen=True)
class PromptLine:
    """A prompt. chunks: None where the question is to retrieve them; overrides: values of settings
    for this line alone; notes: what the user should be told."""

    name: LineName
    question: str
    chunks: tuple[ChunkOfLine, ...] | None
    overrides: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BadLine:
    """A line that is no prompt, and why."""

    name: LineName
    error: CacheblendError


class LineParser:
    """Parses lines for one run. compare: whether answers are compared with full prefill."""

    def __init__(self, settings: Settings, *, compare: bool = False) -> None:
        self._separator = settings.text_separator
        values = {name: str(getattr(settings, name)) for name in _DECIDING}
        if settings.engine != "torch":
            values["engine"] = settings.engine
        self._decided = json.dumps([values, compare]).encode()

    def parse(self, raw: RawLine) -> PromptLine | BadLine | None:
        """What the line holds; None for a blank one. A byte order mark and a Windows line end are
        no part of it."""
        data = raw.data.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r")
        if not data and not raw.too_long:
            return None
        digest = blake3(self._decided + b"\n" + data).hexdigest()[:32]
        name = LineName(raw.number, None, digest)
        try:
            if raw.too_long:
                raise UsageError(
                    f"longer than {MAX_LINE_BYTES} bytes", "split it; each line holds one prompt"
                )
            value = _object(data)
            name = LineName(raw.number, _id(value), digest)
            return self._prompt(name, value)
        except CacheblendError as error:
            return BadLine(name, error)

    def _prompt(self, name: LineName, value: Mapping[str, object]) -> PromptLine:
        for key in value:
            if key not in _KEYS:
                near = nearest(key, _KEYS)
                raise UsageError(
                    f"unknown key {key!r}", f"did you mean {near}?" if near else _FORMS
                )
        overrides = _overrides(value)
        if "prompt" in value:
            return self._split(name, value, overrides)
        chunks = value.get("chunks")
        if chunks is not None and not isinstance(chunks, list):
            raise UsageError(f"chunks is {_kind(chunks)}", "make it a list; leave it out to search")
        given = None if chunks is None else tuple(_chunk(n, c) for n, c in enumerate(chunks, 1))
        return PromptLine(name, _text(value, "question"), given, overrides)

    def _split(
        self, name: LineName, value: Mapping[str, object], overrides: dict[str, object]
    ) -> PromptLine:
        """A prompt in one text. Its instructions are the system prompt."""
        both = next((key for key in ("question", "chunks") if key in value), "")
        if both:
            raise UsageError(f"a line has prompt or {both}, not both", _FORMS)
        parts = PromptText.split(_text(value, "prompt"), self._separator)
        if parts.instructions:
            if "system" in overrides:
                raise UsageError(
                    "system is given, and the prompt begins with instructions of its own",
                    "leave out one of them; a prompt that begins with the separator has none",
                )
            overrides["system"] = parts.instructions
        notes = () if parts.chunks else ("the prompt has no chunks: all of it is computed",)
        chunks = tuple(ChunkOfLine(text=text) for text in parts.chunks)
        return PromptLine(name, parts.question, chunks, overrides, notes)


def _object(data: bytes) -> dict[str, object]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"not UTF-8 text: byte {error.start + 1} of the line", "save the file as UTF-8"
        ) from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} at character {error.pos + 1}", _FORMS) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}", _FORMS) from None
    if not isinstance(value, dict):
        raise UsageError(f"{_kind(value)}, not a JSON object", _FORMS)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"key {twice!r} is there twice", "leave out one of them")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _id(value: Mapping[str, object]) -> str | int | None:
    found = value.get("id")
    if isinstance(found, bool) or not isinstance(found, str | int | None):
        raise UsageError(f"id is {_kind(found)}", "make it a text or a whole number")
    return found


def _text(value: Mapping[str, object], key: str) -> str:
    found = value.get(key)
    if found is None:
        raise UsageError(f"there is no {key}", _FORMS)
    if not isinstance(found, str):
        raise UsageError(f"{key} is {_kind(found)}", "make it a text")
    if not found.strip():
        raise UsageError(f"the {key} is empty", _FORMS)
    return found


def _chunk(number: int, value: object) -> ChunkOfLine:
    """Chunk `number` of a line: a text, {"text": …, "source": …} or {"id": …}."""
    what = f"chunk {number}"
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict):
        raise UsageError(f"{what} is {_kind(value)}", 'make it a text, {"text": …} or {"id": …}')
    for key, item in value.items():
        if key not in _CHUNK_KEYS:
            near = nearest(key, _CHUNK_KEYS)
            raise UsageError(
                f"{what} has the unknown key {key!r}",
                f"did you mean {near}?" if near else f"it takes {', '.join(_CHUNK_KEYS)}",
            )
        if not isinstance(item, str):
            raise UsageError(f"{key} of {what} is {_kind(item)}", "make it a text")
    if ("id" in value) == ("text" in value) or ("id" in value and "source" in value):
        raise UsageError(
            f"{what} has {' and '.join(value) or 'nothing'}",
            "give either the id of a stored chunk, or a text and, if you like, its source",
        )
    if "text" in value and not value["text"].strip():
        raise UsageError(f"{what} is empty", "leave it out")
    return ChunkOfLine(value.get("text", ""), value.get("source", ""), value.get("id", ""))


def _overrides(value: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in OVERRIDES:
        item = value.get(name)
        if item is not None:
            if name == "stop" and isinstance(item, str):
                item = [item]  # a bare one would be read as a shell's, with its backslashes
            found[name] = read_value(name, item, Origin("line", name), Path())
    return found


def _kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "a text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names[type(value)]
