"""What prompts found in the store, counted, and what is said of the chunks that missed."""

from collections import Counter
from collections.abc import Sequence

from cache_store.keys import KVSpec
from cache_store.misses import MissReason
from engine.sources import KVStore, Source

OTHER_MODEL = "stored for another model, tokenizer or KV dtype"


def account(
    store: KVStore | None, spec: KVSpec, found: Sequence[Source], *, strict: bool
) -> tuple[MissReason | None, ...]:
    """Why each source missed, None for those that didn't; hits and misses are counted, uses
    noted.

    For after the answer, and before what missed is stored. strict: KV behind other prefixes was
    not wanted.
    """
    if store is None:
        return (None,) * len(found)
    reasons: list[MissReason | None] = []
    for source in found:
        segment, reason = source.segment, None
        if segment.kind == "chunk" and source.status == "miss":
            reason = store.reason_for_miss(
                spec, segment.token_ids, segment.chunk_id or "", strict=strict
            )
            store.counters.add(f"miss.{reason}")
        elif segment.kind == "chunk" and source.match is not None:
            store.counters.add("hit.exact" if source.status == "exact" else "hit.other_context")
        reasons.append(reason)
    store.note_uses()
    return tuple(reasons)


def notes(reasons: Sequence[MissReason | None], *, saved: bool) -> tuple[str, ...]:
    """What the user can do something about, a line a reason. saved: what missed is stored now,
    which settles it for these very chunks."""
    counts = Counter(reasons)
    said = []
    if number := counts["other_model"]:
        said.append(f"{_chunks(number)} {OTHER_MODEL}: ingest again with these settings")
    if (number := counts["context"]) and not saved:
        said.append(
            f"{_chunks(number)} stored behind another prefix only, which --strict-context refuses: "
            "ingest again with this system prompt, or use --any-context"
        )
    if (number := counts["evicted"]) and not saved:
        said.append(
            f"{_chunks(number)} no longer stored (evicted or removed): ingest again, with a larger "
            "limit if the store is full"
        )
    return tuple(said)


def _chunks(number: int) -> str:
    return "1 chunk is" if number == 1 else f"{number} chunks are"
