"""Whether what is stored of chunks is of any use to the model that is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cache_store.catalog import ChunkInfo
from cache_store.errors import IntegrityError, NotFoundError, StoreBusy
from cache_store.store import ChunkStore
from cache_store.usable import OTHER_DTYPE, difference
from cbcli.output import Output
from cbcli.settings import Settings

if TYPE_CHECKING:
    from engine.blueprint import Blueprint


def require_usable(
    out: Output,
    store: ChunkStore,
    blueprint: Blueprint,
    settings: Settings,
    chunks: Sequence[ChunkInfo],
) -> bool:
    """Refuses a store that another model filled: every chunk would be computed from scratch. Warns
    where it was this model, which stored the KV of all of them in another type; whether it did.

    Raises NotFoundError naming that model.
    """
    prefix, spec = blueprint.template.prefix, blueprint.spec
    encode = blueprint.tokenizer.encode
    if settings.mode != "full":
        store.look_ahead(spec, [encode(c.text) for c in chunks])
    if settings.mode == "full" or any(store.find(spec, encode(c.text), prefix) for c in chunks):
        return False
    wanted = {chunk.chunk_id for chunk in chunks}
    others: set[str] = set()
    types: dict[str, set[str]] = {}
    try:
        entries = list(store.entries())
    except (IntegrityError, StoreBusy):  # the answer's notes say so
        return False
    for entry in entries:
        if entry.spec == spec:
            return False  # this model was here before; what is missing now is computed
        if entry.chunk_id in wanted and difference(entry.spec, spec) == OTHER_DTYPE:
            types.setdefault(entry.spec.dtype, set()).add(entry.chunk_id)
        elif entry.chunk_id in wanted:
            name = store.catalog.model_name(entry.spec.model) or entry.spec.model[:12]
            others.add(f"{name} ({entry.spec.dtype})")
    whole = sorted(dtype for dtype, held in types.items() if held == wanted)
    if whole:
        out.warn(
            f"the KV of these chunks is stored as {', '.join(whole)}, not as {spec.dtype}: they "
            "are computed",
            f"use it as it is: --kv-dtype {whole[0]}",
        )
    elif others and not types:
        raise NotFoundError(
            f"these chunks were ingested with {', '.join(sorted(others))}; the store has no KV of "
            f"{blueprint.name} ({blueprint.kv_dtype}) for them",
            "ingest the documents again with this model, or use --mode full",
        )
    return bool(whole)
