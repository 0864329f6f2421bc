"""How a request names its chunks: by segments, by chunk ids, or by separators in its token ids.

All of it comes from outside: whatever is wrong with it is a UsageError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import groupby, pairwise
from typing import Any, Protocol, cast, get_args

from cache_store.errors import UsageError
from cache_store.keys import pack_ids
from engine.options import BlendOptions
from engine.prompt import Prompt, PromptChunk, Segment, SegmentKind
from engine.trace.record import Level
from engine.vllm.plan import RequestPlan
from engine.vllm.separators import Separator
from engine.vllm.settings import SETTINGS, ConnectorSettings

PARAMETER = "cacheblend"
"""The key of vLLM's `kv_transfer_params` that a request's own wishes are under."""

OPTIONS = (
    *("mode", "policy", "ratio", "threshold", "check_layers", "min_tokens", "strict_context"),
    *("transfer", "seed"),
)
WISHES = (*OPTIONS, "indices", "save", "trace", "question_tokens")
"""What a request may say besides its chunks."""

MOST_SEGMENTS = 20_000
MOST_CHUNKS = 2000
"""Of one prompt: each is looked up in the store, while every other request waits."""
_KEYS = ("segments", "chunks", *WISHES)
_SEGMENT_KEYS = ("kind", "tokens", "chunk_id", "source")
_KINDS: tuple[SegmentKind, ...] = get_args(SegmentKind)
_ID = re.compile(r"[0-9a-f]{64}")
_LONGEST = 4096  # characters of a source


class FindsChunks(Protocol):
    """Chunks of a store by id."""

    def chunk(self, name: str) -> PromptChunk:
        """The chunk of this id, or this beginning of one. Raises CacheblendError."""


class RequestReader:
    """Reads requests. layers: of the model; separator: None where none is looked for; stored: None
    where requests can't name chunks by id."""

    def __init__(
        self,
        settings: ConnectorSettings,
        layers: int,
        separator: Separator | None = None,
        stored: FindsChunks | None = None,
    ) -> None:
        self.settings, self.layers = settings, layers
        self.separator, self.stored = separator, stored

    def read(self, request_id: str, token_ids: Sequence[int], params: object) -> RequestPlan | None:
        """The plan of a request with these token ids and `kv_transfer_params`; None for one that
        names no chunk or wants a full prefill.

        Raises UsageError for what can't be, NotFoundError and the like for chunks that aren't
        known.
        """
        given = _own(params)
        options = options_of(given, self.settings.blend)
        options.check_model(self.layers)
        save, trace = _flag(given, "save", self.settings.save), _level(given, self.settings.trace)
        prompt = self._prompt(token_ids, given)
        if prompt is None or not any(s.kind == "chunk" for s in prompt.segments):
            return None
        if options.mode == "full":
            return None
        chunks = sum(segment.kind == "chunk" for segment in prompt.segments)
        if chunks > MOST_CHUNKS:
            raise UsageError(f"the prompt has {chunks} chunks; at most {MOST_CHUNKS} are taken")
        if options.indices is not None and options.indices[-1:] >= (len(token_ids),):
            raise UsageError(f"indices goes up to {options.indices[-1]}, beyond the prompt")
        suffix = len(prompt.segments[-1].token_ids)
        question = given.get("question_tokens")
        if question is not None:
            question = _whole(question, "question_tokens", 1, suffix)
        return RequestPlan(request_id, prompt, options, save, question, trace)

    def check(self, params: object) -> None:
        """Raises UsageError for what no prompt can have in its `kv_transfer_params`, as far as that
        needs no token ids."""
        given = _own(params)
        check_wishes({name: value for name, value in given.items() if name in WISHES})
        options_of(given, self.settings.blend).check_model(self.layers)
        if "segments" in given and "chunks" in given:
            raise UsageError("segments and chunks exclude each other", "give one of them")
        for name, most in (("segments", MOST_SEGMENTS), ("chunks", MOST_CHUNKS)):
            if name in given:
                _listed(given[name], name, most)

    def _prompt(self, token_ids: Sequence[int], given: Mapping[str, Any]) -> Prompt | None:
        if "segments" in given and "chunks" in given:
            raise UsageError("segments and chunks exclude each other", "give one of them")
        if "segments" in given:
            return from_segments(token_ids, given["segments"])
        if "chunks" in given:
            return self._from_chunks(token_ids, given["chunks"])
        return None if self.separator is None else from_separators(token_ids, self.separator)

    def _from_chunks(self, token_ids: Sequence[int], names: object) -> Prompt:
        if self.stored is None:
            raise UsageError("there is no store to find chunks in")
        names = _listed(names, "chunks", MOST_CHUNKS)
        if not all(isinstance(name, str) for name in names):
            raise UsageError("chunks is not a list of chunk ids", "list them as texts")
        return from_chunks(token_ids, [self.stored.chunk(cast(str, name)) for name in names])


def from_segments(token_ids: Sequence[int], given: object) -> Prompt:
    """A prompt whose segments are listed: `{"kind", "tokens", "chunk_id"?, "source"?}` each, in
    order, the rest being the suffix. Raises UsageError."""
    parts: list[Segment] = []
    start = 0
    for number, item in enumerate(_listed(given, "segments"), 1):
        what = f"segment {number}"
        if not isinstance(item, Mapping):
            raise UsageError(f"{what} is not an object", f"it takes {', '.join(_SEGMENT_KEYS)}")
        _only(item, _SEGMENT_KEYS, f"{what}: ")
        kind = item.get("kind")
        if kind not in _KINDS:
            raise UsageError(f"{what} is of an unknown kind", f"use one of {', '.join(_KINDS)}")
        left = len(token_ids) - start
        tokens = _whole(item.get("tokens"), f"tokens of {what}", 0, 10**18)
        if tokens > left:
            raise UsageError(f"{what} has {tokens} tokens, {left} are left of the prompt")
        name, source = item.get("chunk_id"), item.get("source")
        if name is not None and not (isinstance(name, str) and _ID.fullmatch(name)):
            raise UsageError(f"chunk_id of {what} is not a chunk's id", "give all 64 hex digits")
        if source is not None and not (isinstance(source, str) and len(source) <= _LONGEST):
            raise UsageError(f"source of {what} is not a text of {_LONGEST} characters at most")
        ids = tuple(token_ids[start : start + tokens])
        if ids:
            is_chunk = kind == "chunk"
            parts.append(
                Segment(
                    cast(SegmentKind, kind),
                    *(ids, start, name if is_chunk else None, source if is_chunk else None),
                )
            )
        start += tokens
    parts.append(Segment("suffix", tuple(token_ids[start:]), start))
    kinds = [part.kind for part in parts]
    for kind, at in (("prefix", 0), ("suffix", -1)):
        if kind in (kinds[1:] if at == 0 else kinds[: _last_other(kinds)]):
            raise UsageError(
                f"a {kind} is not the {'first' if at == 0 else 'last'} segment",
                "call what stands between chunks a separator",
            )
    return _joined(parts)


def from_chunks(token_ids: Sequence[int], chunks: Sequence[PromptChunk]) -> Prompt:
    """A prompt in which these chunks' ids stand, in this order; what is between them is computed.
    Raises UsageError for a chunk that isn't found behind the one before it."""
    packed = _packed(token_ids)
    parts: list[Segment] = []
    start = 0
    for number, chunk in enumerate(chunks, 1):
        if not chunk.token_ids:
            continue
        at = _find(packed, pack_ids(chunk.token_ids), start)
        if at < 0:
            raise UsageError(
                f"chunk {number} ({(chunk.chunk_id or '')[:12]}) isn't in the prompt"
                + (", or not behind the one before it" if number > 1 else ""),
                "its text must be encoded alone, not together with what stands around it",
            )
        if at > start:
            parts.append(Segment("separator", tuple(token_ids[start:at]), start))
        start = at + len(chunk.token_ids)
        parts.append(Segment("chunk", chunk.token_ids, at, chunk.chunk_id, chunk.source))
    parts.append(Segment("suffix", tuple(token_ids[start:]), start))
    return _joined(parts)


def from_separators(token_ids: Sequence[int], separator: Separator) -> Prompt | None:
    """A prompt split at every place where the separator stands: what is before the first one is
    the prefix, what is behind the last one the question. None for one with fewer than two, which
    has no chunk, and where there is nothing but blanks between them."""
    places = separator.places(token_ids)
    if len(places) < 2:
        return None
    ids = tuple(token_ids)
    parts = [Segment("prefix", ids[: places[0][0]], 0)]
    for (begin, end), (stop, _) in pairwise([*places, (len(ids), 0)]):
        parts.append(Segment("separator", ids[begin:end], begin))
        between = ids[end:stop]
        parts.append(Segment("separator" if separator.is_blank(between) else "chunk", between, end))
    # Without a question the last separator is what is left to be computed.
    parts = [part for part in parts if part.token_ids]
    parts[-1] = replace(parts[-1], kind="suffix")
    return _joined(parts) if any(part.kind == "chunk" for part in parts) else None


def listed(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt's segments as a request lists them; the suffix is what is left."""
    found: list[dict[str, Any]] = []
    for segment in prompt.segments[:-1]:
        item: dict[str, Any] = {"kind": segment.kind, "tokens": len(segment.token_ids)}
        if segment.chunk_id is not None:
            item["chunk_id"] = segment.chunk_id
        if segment.source is not None and len(segment.source) <= _LONGEST:
            item["source"] = segment.source
        found.append(item)
    return found


def check_wishes(given: Mapping[str, Any]) -> None:
    """Raises UsageError for wishes that no request can have, as far as that needs no prompt."""
    _only(given, WISHES)
    options_of(given, BlendOptions())
    _flag(given, "save", True)
    _level(given, None)
    if given.get("question_tokens") is not None:
        _whole(given["question_tokens"], "question_tokens", 1)


def options_of(given: Mapping[str, Any], default: BlendOptions) -> BlendOptions:
    """A request's own options over the connector's. Raises UsageError."""
    own: dict[str, Any] = {}
    for name in OPTIONS:
        if given.get(name) is None:
            continue
        try:
            own[name] = SETTINGS[name].kind(given[name])
        except ValueError as error:
            shown = repr(given[name])[:80]
            raise UsageError(f"{name} is {shown}", f"expected {error}") from None
    if given.get("indices") is not None:
        indices = _listed(given["indices"], "indices")
        own["indices"] = [_whole(item, "one of indices", 0) for item in indices]
        own.setdefault("policy", "explicit")
    if "ratio" in own and "threshold" in own:
        raise UsageError("ratio and threshold exclude each other", "give one of them")
    if not own:
        return default
    base: dict[str, Any] = {
        "mode": default.mode,
        "policy": default.policy,
        "ratio": default.ratios,
        "threshold": default.threshold,
        "check_layers": default.check_layers,
        "min_tokens": default.min_tokens,
        "seed": default.seed,
        "strict_context": default.strict_context,
        "loader": default.loader,
        "transfer": default.transfer,
    }
    if "ratio" in own or "indices" in own:
        base["threshold"] = None
    if base["threshold"] is not None or "threshold" in own or not base["ratio"]:
        base.pop("ratio")
    elif len(own.get("check_layers", base["check_layers"])) != len(base["ratio"]):
        base["ratio"] = base["ratio"][:1]  # its own layers, without ratios: one for all of them
    return BlendOptions.of(**{**base, **own})


def _joined(parts: Sequence[Segment]) -> Prompt:
    """Segments in order, as a prompt: all before the first chunk is its prefix, all behind the
    last one its suffix, and neighbouring separators are one. Raises UsageError without a suffix:
    the first output token comes from its last one."""
    kept = [part for part in parts if part.token_ids]
    chunks = [index for index, part in enumerate(kept) if part.kind == "chunk"]
    first, last = (chunks[0], chunks[-1]) if chunks else (0, -1)
    named: list[Segment] = []
    for index, part in enumerate(kept):
        kind: SegmentKind = "prefix" if index < first else "suffix" if index > last else part.kind
        named.append(replace(part, kind="chunk" if kind == "chunk" else _between(kind)))
    segments: list[Segment] = []
    for kind, run in groupby(named, lambda part: part.kind):
        group = list(run)
        if kind == "chunk":
            segments += group
        else:
            ids = tuple(token for part in group for token in part.token_ids)
            segments.append(Segment(kind, ids, group[0].start))
    if not segments or segments[-1].kind != "suffix":
        raise UsageError("the prompt ends without a question", "give a question")
    return Prompt(tuple(segments))


def _between(kind: SegmentKind) -> SegmentKind:
    return kind if kind in ("prefix", "suffix") else "separator"


def _last_other(kinds: Sequence[SegmentKind]) -> int:
    """Where the run of suffixes at the end begins."""
    at = len(kinds)
    while at and kinds[at - 1] == "suffix":
        at -= 1
    return at


def _own(params: object) -> Mapping[str, Any]:
    """A request's own wishes, of all its `kv_transfer_params`."""
    if not isinstance(params, Mapping) or params.get(PARAMETER) is None:
        return {}
    given = params[PARAMETER]
    if not isinstance(given, Mapping):
        raise UsageError(f"kv_transfer_params: {PARAMETER} is not an object")
    _only(given, _KEYS)
    return {name: value for name, value in given.items() if value is not None}


def _only(given: Mapping[Any, Any], known: Sequence[str], what: str = "") -> None:
    for key in given:
        if key not in known:
            near = get_close_matches(str(key)[:80], known, n=1, cutoff=0.4)
            raise UsageError(
                f"{what}unknown key {str(key)[:80]!r}",
                f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}",
            )


def _listed(value: object, what: str, most: int = MOST_SEGMENTS) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"{what} is not a list")
    if len(value) > most:
        raise UsageError(f"{what} lists {len(value)}; at most {most} are taken")
    return value


def _whole(value: object, what: str, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} is not a whole number")
    if value < low or (high is not None and value > high):
        shown = str(value) if abs(value) < 10**18 else "far outside"
        upper = "on" if high is None else f"to {high}"
        raise UsageError(f"{what} is {shown}, not a number from {low} {upper}")
    return value


def _level(given: Mapping[str, Any], most: Level | None) -> Level | None:
    """No more than the connector's own, `most`: a full trace is a prefill that everybody waits for,
    and every trace a file."""
    value = given.get("trace", True)
    if not (value is None or isinstance(value, bool) or value in get_args(Level)):
        raise UsageError("trace is unknown", f"use one of {', '.join(get_args(Level))}")
    if most is None or value is False:
        return None
    return "basic" if "basic" in (value, most) else most


def _flag(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise UsageError(f"{name} is not true or false")
    return value


def _packed(token_ids: Sequence[int]) -> bytes:
    try:
        return pack_ids(token_ids)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _find(packed: bytes, wanted: bytes, start: int) -> int:
    """Where the ids stand, from `start` on; -1 where they don't."""
    at = packed.find(wanted, 4 * start)
    while at >= 0 and at % 4:  # across ids
        at = packed.find(wanted, at + 1)
    return at // 4 if at >= 0 else -1
