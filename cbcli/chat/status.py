"""What a turn took, in a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbcli.units import count_text, duration_text

if TYPE_CHECKING:
    from cbcli.chat.talk import Spoken


def status_line(spoken: Spoken) -> str:
    """First token, tokens kept and new, and what of the new chunks was computed again."""
    done, result = spoken.done, spoken.result
    parts = [
        f"turn {done.turn}: first token after {duration_text(result.timing.ttft_s)}",
        f"{done.kept_tokens:,} tokens kept, {done.new_tokens:,} new",
    ]
    cached = sum(
        s.end - s.start
        for s in result.prompt.segments
        if s.kind == "chunk" and s.status in ("exact", "hit")
    )
    if cached:
        again = result.recomputed.tokens
        parts.append(f"{again:,} of {count_text(cached, 'cached tokens')} recomputed")
    parts.append(f"{done.computed_tokens:,} computed in all")
    if result.compare is not None:
        c = result.compare
        parts.append(
            f"full prefill {duration_text(c.ttft_s)} ({c.speedup:.1f}x), mean KL {c.kl_mean:.4f}"
        )
    if result.finish_reason == "interrupted":
        parts.append("stopped")
    return "; ".join(parts)
