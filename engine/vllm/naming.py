"""How a request names its chunks: by segments it lists, or by separators in its token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from cache_store.errors import UsageError
from engine.options import BlendOptions
from engine.prompt import Prompt, Segment, SegmentKind

PARAMETER = "cacheblend"
"""The key of vLLM's `kv_transfer_params` that a request's own wishes are under."""


def from_segments(token_ids: Sequence[int], listed: Sequence[Mapping[str, Any]]) -> Prompt:
    """A prompt whose segments are listed: `{"kind", "tokens", "chunk_id"?, "source"?}` each, in
    order, the rest being the suffix. Raises UsageError."""
    segments: list[Segment] = []
    start = 0
    for item in listed:
        kind: SegmentKind = item["kind"]
        ids = tuple(token_ids[start : start + int(item["tokens"])])
        if ids:
            segments.append(Segment(kind, ids, start, item.get("chunk_id"), item.get("source")))
        start += len(ids)
    suffix = tuple(token_ids[start:])
    if not suffix:
        raise UsageError("the prompt ends without a question", "give a question")
    segments.append(Segment("suffix", suffix, start))
    return Prompt(tuple(segments))


def from_separators(token_ids: Sequence[int], separator: Sequence[int]) -> Prompt | None:
    """A prompt split at every place where the separator's ids stand: prefix, chunks, suffix. None
    for one with fewer than two separators, which names no chunk."""
    ids, size = tuple(token_ids), len(separator)
    first = separator[0]
    places: list[int] = []
    at = 0
    while at + size <= len(ids):
        if ids[at] == first and ids[at : at + size] == tuple(separator):
            places.append(at)
            at += size
        else:
            at += 1
    if len(places) < 2 or places[-1] + size >= len(ids):
        return None
    segments: list[Segment] = []
    start = 0
    for index, place in enumerate(places):
        if place > start:
            segments.append(Segment("prefix" if index == 0 else "chunk", ids[start:place], start))
        segments.append(Segment("separator", ids[place : place + size], place))
        start = place + size
    segments.append(Segment("suffix", ids[start:], start))
    return Prompt(tuple(segments))


def options_of(given: Mapping[str, Any], default: BlendOptions) -> BlendOptions:
    """A request's own options over the connector's. Raises UsageError."""
    names = ("mode", "policy", "ratio", "threshold", "check_layers", "indices", "min_tokens")
    own = {name: given[name] for name in names if name in given}
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
    if "threshold" not in own and "ratio" in own:
        base["threshold"] = None
    if base["threshold"] is not None and "ratio" not in own:
        base.pop("ratio")
    return BlendOptions.of(**{**base, **own})
