"""A result in words: what was done, how long it took, and why it didn't take less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbcli.units import count_text, duration_text, rate_text, size_text

if TYPE_CHECKING:
    from engine.results import AskResult

SHORT_PROMPT = 1000  # tokens; below it the parts that never shrink are most of the work
HIGH_RATIO = 0.35
SLOW_LOAD = 0.3  # share of the time to first token spent waiting for stored KV
COLD_START = 2.0  # loading the model, in times to first token


def headline(result: AskResult) -> str:
    """One line: first token, what was recomputed, and the comparison if there was one."""
    cached, prompt = _cached(result), len(result.prompt.token_ids)
    parts = [f"first token after {duration_text(result.timing.ttft_s)}"]
    if result.skipped_blend:
        parts.append(f"all {prompt:,} tokens computed, as fewer than --min-tokens are cached")
    elif result.mode == "full":
        parts.append(f"all {prompt:,} tokens computed")
    elif result.mode == "prefix":
        parts.append(f"exact leading part reused, {prompt:,} tokens in all")
    else:
        share = f" ({100 * result.recomputed.fraction:.0f}%)" if cached else ""
        parts.append(
            f"{result.recomputed.tokens:,} of {cached:,} cached tokens recomputed{share}, "
            f"{prompt:,} tokens in all"
        )
    if result.compare is not None:
        c = result.compare
        same = "the same answer" if c.first_divergence is None else "another answer"
        parts.append(
            f"full prefill {duration_text(c.ttft_s)} ({c.speedup:.1f}x) and {same}, "
            f"mean KL {c.kl_mean:.4f}, top-1 agreement {100 * c.top1_agreement:.0f}%"
        )
    elif result.audit is not None:
        a = result.audit
        parts.append(
            f"audited: mean KL {a.kl_mean:.4f}, top-1 agreement {100 * a.top1_agreement:.0f}%"
        )
    return "; ".join(parts)


def why_not_faster(result: AskResult) -> list[str]:
    """Where the time to first token went, then every reason that kept it from being less."""
    from engine.bound import policy_of  # which takes torch, and is not for --help

    t, prompt = result.timing, len(result.prompt.token_ids)
    spent = (
        ("waiting for stored KV", t.kv_stall_s),
        ("placing it", t.rotate_s),
        ("choosing tokens", t.score_s),
        ("computing tokens", t.recompute_s),
    )
    lines = ["time: " + ", ".join(f"{what} {duration_text(s)}" for what, s in spent)]
    if result.kv.bytes_loaded and t.kv_load_s > t.kv_stall_s:
        lines.append(
            f"loading: {size_text(result.kv.bytes_loaded)} of stored KV took "
            f"{duration_text(t.kv_load_s)}, {duration_text(t.kv_load_s - t.kv_stall_s)} of it "
            "while computing"
        )
    if result.skipped_blend:
        lines.append(f"too short to blend: {result.skipped_blend}")
    misses = [s for s in result.prompt.segments if s.status == "miss"]
    if misses:
        tokens = sum(s.end - s.start for s in misses)
        lines.append(
            f"misses: {count_text(len(misses), 'chunks')}, {count_text(tokens, 'tokens')}, had no "
            "usable KV of this model and were computed"
        )
    if prompt < SHORT_PROMPT and not result.skipped_blend:
        lines.append(
            f"short prompt: of {prompt:,} tokens, question and template are always computed; "
            "the gain grows with length"
        )
    blended = result.mode == "blend" and not result.skipped_blend
    if blended and result.recomputed.fraction > HIGH_RATIO:
        lines.append(
            f"high ratio: {100 * result.recomputed.fraction:.0f}% of the cached tokens were "
            "recomputed; --ratio 0.16 is usual"
        )
    layers = max(result.check_layers, default=0)
    if blended and layers > 1 and policy_of(result.policy).full_layers:
        lines.append(f"late check: layers 0 to {layers} were computed for more tokens than chosen")
    if t.kv_stall_s > SLOW_LOAD * t.ttft_s and result.kv.bytes_loaded:
        rate = rate_text(result.kv.bytes_loaded / t.kv_load_s, "bytes")
        lines.append(
            f"slow disk: {size_text(result.kv.bytes_loaded)} of KV came at {rate}; the next run "
            "may find it in memory"
        )
    if t.load_model_s > COLD_START * t.ttft_s:
        lines.append(
            f"cold start: loading the model took {duration_text(t.load_model_s)}, besides the time "
            "to first token; the Python API loads it once for many prompts"
        )
    return lines


def _cached(result: AskResult) -> int:
    return sum(
        s.end - s.start
        for s in result.prompt.segments
        if s.kind == "chunk" and s.status in ("exact", "hit")
    )
