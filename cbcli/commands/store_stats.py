"""`cacheblend store stats`: the store in numbers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from cache_store.results import TierStats
from cache_store.store import StoreStats
from cache_store.tiers.addresses import masked
from cbcli import flags
from cbcli.audit_report import AuditReport
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.fields import SHOWN_DIGITS
from cbcli.output import Output
from cbcli.settings import Settings
from cbcli.store_access import reading, store_settings
from cbcli.units import count_text, duration_text, size_text

EXAMPLES = examples("cacheblend store stats", "cacheblend store stats --json | jq .counters")

# What is counted at a look-up, in words; what isn't here is shown by its own.
_WORDS = {
    "hit.exact": "exact",
    "hit.other_context": "behind other text",
    "miss.absent": "never stored",
    "miss.evicted": "evicted or removed",
    "miss.damaged": "damaged",
    "miss.other_model": "of another model, tokenizer or dtype",
    "miss.context": "behind another prefix (--strict-context)",
    "miss.remote": "not to be had from the remote",
}


@flags.with_settings("store")
def stats(
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show how much is stored, and what prompts found.

    Also how much room there is, and how good audited answers were.

    Answers are audited with --audit of `ask` and `run`; the mean KL is that of the last 100."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = store_settings(options)
    with reading(options) as store:
        found = store.stats()
        counters = store.counters.read()
        pending = store.pending_uploads()
        audited = AuditReport.of(store)
    tiers = _tiers(settings, found, pending)
    audited.warn(out)
    if json:
        out.data(
            {
                **asdict(found),
                "counters": counters,
                "pending_uploads": pending,
                "tiers": [_described(tier) for tier in tiers],
                "audit": audited.described(),
            }
        )
    else:
        uploads = [("to upload", count_text(pending, "entries"))] if pending else []
        out.pairs([*_stat_pairs(found), *_counter_pairs(counters), *_tier_pairs(tiers), *uploads])
        audited.show(out)


def _tiers(settings: Settings, found: StoreStats, pending: int) -> list[TierStats]:
    """The tiers that the settings name, nearest first. What is in memory is known to the process
    that keeps it alone, and what a remote holds to the remote."""
    tiers = [TierStats("disk", found.path, found.used, found.limit, found.hits)]
    if settings.memory_limit:
        tiers.insert(0, TierStats("memory", "", None, settings.memory_limit, 0))
    if settings.remote is not None:
        tiers.append(TierStats("remote", masked(settings.remote), None, None, 0, pending))
    return tiers


def _described(tier: TierStats) -> dict[str, object]:
    return {
        "name": tier.name,
        "where": tier.where or None,
        "bytes": tier.nbytes,
        "limit": tier.limit,
        "pending": tier.pending,
    }


def _tier_pairs(tiers: Sequence[TierStats]) -> list[tuple[str, object]]:
    """A line a tier, where there is more than the disk."""
    lines = []
    for tier in tiers if len(tiers) > 1 else ():
        if tier.name == "memory":
            size = f"up to {size_text(tier.limit or 0)}, each process its own"
        elif tier.nbytes is None:
            size = f"{tier.where}, of unknown size"
        else:
            size = size_text(tier.nbytes)
        lines.append(f"{tier.name:6}  {size}")
    return [("tiers", "\n".join(lines))] if lines else []


def _counter_pairs(counters: Mapping[str, int]) -> list[tuple[str, object]]:
    """Look-ups since the store was made, and evictions."""
    pairs: list[tuple[str, object]] = []
    for label, kind in (("found", "hit."), ("missed", "miss.")):
        counts = {name: number for name, number in counters.items() if name.startswith(kind)}
        if counts:
            parts = (
                f"{count_text(number)} {_WORDS.get(name, name.removeprefix(kind))}"
                for name, number in counts.items()
            )
            pairs.append(
                (label, f"{count_text(sum(counts.values()), 'chunks')}: {', '.join(parts)}")
            )
    if counters.get("eviction"):
        freed = size_text(counters.get("eviction.bytes", 0))
        pairs.append(("evicted", f"{count_text(counters['eviction'], 'entries')}, {freed}"))
    return pairs


def _stat_pairs(found: StoreStats) -> list[tuple[str, object]]:
    share = f"{100 * found.used / found.limit:.1f}%" if found.limit else "?"
    pairs: list[tuple[str, object]] = [
        ("path", found.path),
        ("used", f"{size_text(found.used)} of {size_text(found.limit)} ({share})"),
        ("eviction", found.eviction),
        (
            "documents",
            count_text(found.documents)
            + (f", {found.pinned_documents:,} pinned" if found.pinned_documents else ""),
        ),
        (
            "chunks",
            f"{count_text(found.document_chunks)}, {count_text(found.document_tokens, 'tokens')}",
        ),
        (
            "entries",
            f"{count_text(found.entries)}, {count_text(found.entry_tokens, 'tokens')}, "
            f"{size_text(found.entry_bytes)}"
            + (f", {found.saved_entries:,} of them only saved" if found.saved_entries else ""),
        ),
        (
            "models",
            ", ".join(
                f"{model.name or model.fingerprint[:SHOWN_DIGITS]} ({model.dtype})"
                for model in found.models
            )
            or "none",
        ),
        ("uses", f"{count_text(found.hits)} of the entries that are here now"),
    ]
    if found.newest_use is not None and found.oldest_use is not None:
        now = time.time()
        ages = [duration_text(max(0.0, now - at)) for at in (found.newest_use, found.oldest_use)]
        pairs.append(("last used", f"{ages[0]} ago; the least recent entry {ages[1]} ago"))
    return pairs
