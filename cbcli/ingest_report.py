"""What `cacheblend ingest` says it has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cbcli.output import Output
from cbcli.session import shown_source
from cbcli.store_listing import plural
from cbcli.units import count_text, duration_text, rate_text, size_text

if TYPE_CHECKING:
    from cbcli.ingest_run import Ingested
    from engine.blueprint import Blueprint
    from engine.documents import Skipped
    from engine.ingest_plan import IngestPlan

_NAMED = 5  # damaged files in one line


def tell(
    out: Output,
    blueprint: Blueprint,
    done: Ingested,
    watched: Mapping[str, object] | None = None,
) -> None:
    """Prints it, and warns. watched: more fields for JSON, of a round of --watch."""
    plan, report, seconds = done.plan, done.report, done.seconds
    states = {"new": 0, "changed": 0, "unchanged": 0}
    for document in plan.documents:
        states[document.state] += 1
    if done.damaged:
        out.warn(_listed(done.damaged), "mended, or computed and stored again")
    for item in plan.unreadable:
        out.warn(f"{shown_source(item.source)}: {item.reason}", "left out; the rest was ingested")
    notes = [(document, note) for document in plan.documents for note in document.notes]
    for document, note in notes:
        if document.state != "unchanged":  # told when it was read first
            out.warn(f"{shown_source(document.source)}: {note}")
    if out.json:
        out.data(
            {
                "documents": states,
                "chunks": {
                    "total": plan.chunk_count,
                    "computed": report.computed_chunks,
                    "downloaded": plan.brought,
                    "dropped": report.dropped_chunks,
                    "checked": plan.checked,
                    "repaired": len(plan.damaged),
                },
                "tokens_computed": report.computed_tokens,
                "bytes_written": plan.nbytes,
                "bytes_checked": plan.checked_bytes,
                "context": context_record(blueprint),
                "bytes_freed": report.dropped_bytes,
                "seconds": seconds,
                "empty": list(plan.empty),
                "removed": list(report.removed),
                **skipped_record(plan.skipped),
                "unreadable": [{"source": u.source, "reason": u.reason} for u in plan.unreadable],
                "notes": [{"source": d.source, "note": note} for d, note in notes],
                **(watched or {}),
            }
        )
        return
    if out.quiet:
        return
    counts = ", ".join(f"{count} {state}" for state, count in states.items() if count)
    out.line(
        f"{count_text(len(plan.documents), 'documents')} ({counts or 'nothing to read'}), "
        f"{count_text(plan.chunk_count, 'chunks')}"
    )
    if plan.checked or plan.damaged:
        out.line(_checks(plan))
    if report.computed_chunks:
        rate = rate_text(report.computed_tokens / seconds, "tokens")
        out.line(
            f"computed {count_text(report.computed_chunks, 'chunks')}{behind(blueprint)}: "
            f"{count_text(report.computed_tokens, 'tokens')}, {size_text(plan.nbytes)}, "
            f"in {duration_text(seconds)} ({rate})"
        )
    elif plan.chunk_count and not plan.brought:
        out.line(f"nothing to compute: all of it was stored already ({duration_text(seconds)})")
    if plan.brought:
        out.line(f"downloaded {count_text(plan.brought, 'chunks')} that the remote store had")
    if report.removed:
        names = ", ".join(shown_source(name) for name in report.removed[:3])
        more = f" and {len(report.removed) - 3} more" if len(report.removed) > 3 else ""
        out.line(f"removed {count_text(len(report.removed), 'documents')}: {names}{more}")
    if report.dropped_chunks:
        out.line(
            f"dropped {count_text(report.dropped_chunks, 'chunks')} that no document has any "
            f"more, {size_text(report.dropped_bytes)} freed"
        )
    if plan.empty:
        shown = ", ".join(shown_source(name) for name in plan.empty[:3])
        more = f" and {len(plan.empty) - 3} more" if len(plan.empty) > 3 else ""
        out.line(f"{len(plan.empty)} empty: {shown}{more}")
    if plan.skipped:
        out.line(skipped_line(plan.skipped) + ("" if out.verbose else " (-v names them)"))
    name_skipped(out, plan.skipped)


def name_skipped(out: Output, skipped: Iterable[Skipped]) -> None:
    """Each file that was left out, with -v."""
    for one in skipped:
        out.note(f"left out: {shown_source(one.source)} ({one.reason})", level=1)


def skipped_line(skipped: Iterable[Skipped]) -> str:
    """What of the folders was left out, by reason."""
    counts = _by_reason(skipped)
    return "left out: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def skipped_record(skipped: Sequence[Skipped]) -> dict[str, object]:
    """The same, for JSON."""
    return {
        "skipped": [{"source": s.source, "reason": s.reason} for s in skipped],
        "skipped_counts": _by_reason(skipped),
    }


def _by_reason(skipped: Iterable[Skipped]) -> dict[str, int]:
    """How many were left out for each reason, the commonest first."""
    return dict(Counter(item.reason for item in skipped).most_common())


def _checks(plan: IngestPlan) -> str:
    """What checking found, in entries, as `store verify` and `store stats` count them."""
    found = f"{len(plan.damaged)} damaged and mended" if plan.damaged else "all sound"
    read = f"{plural(plan.checked, 'entry', 'entries')}, {size_text(plan.checked_bytes)}"
    return f"checked {read}: {found}" if plan.checked else f"entries: {found}"


def _listed(lines: list[str]) -> str:
    """Several messages in one line."""
    lines = list(dict.fromkeys(lines))
    more = f"; and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more


def context_record(blueprint: Blueprint) -> dict[str, object]:
    """What chunks are computed behind, for --json."""
    return {"kind": blueprint.context, "tokens": len(blueprint.chunk_context)}


def behind(blueprint: Blueprint) -> str:
    """The same in words, where it isn't the usual."""
    if blueprint.context == "prefix":
        return ""
    return " behind the first token alone" if blueprint.chunk_context else " behind nothing"
