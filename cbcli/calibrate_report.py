"""What `calibrate` prints: the gate, quality over ratio, the choice; and the table of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import TYPE_CHECKING

from cbcli.output import Output
from cbcli.units import count_text, duration_text, rate_text

if TYPE_CHECKING:
    from engine.blueprint import Blueprint
    from engine.calibration.curve import Curve, Point
    from engine.calibration.profile import Profile, TaskProfile
    from engine.calibration.speed import Speed

STANDARD = (4096, 4040, 4072)  # tokens of the prompt of the device table: all, cached, loaded


def show(out: Output, blueprint: Blueprint, profile: Profile, task: TaskProfile | None) -> None:
    """The gate and, unless it failed or stands alone, what was measured for a task."""
    if out.json:
        out.data(profile.to_json())
        return
    out.line(f"{blueprint.name}, {blueprint.precision} on {blueprint.device}")
    _show_gate(out, profile)
    if task is None or not profile.passed:
        return
    out.line()
    out.line(
        f"{task.task}: {count_text(task.prompts, 'prompts')} of {task.material}, "
        f"{count_text(round(task.tokens), 'tokens')} on average, context {task.context}; "
        "mean KL from full prefill, nats, of 16 answer tokens"
    )
    _show_curves(out, task)
    out.line()
    curve = task.curve(task.policy)
    at = f", {_near(curve, task.ratio).speedup:.1f}x as soon as full prefill" if curve else ""
    out.line(f"for a mean KL of {task.target_kl:g}: policy {task.policy}, ratio {task.ratio}{at}")
    if task.ratio == 1:
        out.line("no ratio below 1 reaches that: blending gains nothing here")
    if profile.speed is not None:
        _show_speed(out, profile.speed)


def _show_gate(out: Output, profile: Profile) -> None:
    checks = profile.gate.checks if profile.gate else ()
    headers = ["gate", "check", "measured", "limit", "what"]
    rows = [
        (
            "ok" if check.passed else "FAIL",
            check.name,
            f"{check.value:.3g}",
            f"{'>=' if check.at_least else '<='} {check.limit:g}",
            check.said,
        )
        for check in checks
    ]
    out.table(headers, rows, right=["measured"])


def _show_curves(out: Output, task: TaskProfile) -> None:
    ratios = [point.ratio for point in task.curves[0].points]
    headers = ["policy", *(f"{ratio:g}" for ratio in ratios), f"ratio for {task.target_kl:g}"]
    rows = [
        (
            curve.policy,
            *(f"{point.kl:.4f}" for point in curve.points),
            curve.ratio_for(task.target_kl),
        )
        for curve in task.curves
    ]
    out.table(headers, rows, right=headers[1:])
    chosen = task.curve(task.policy)
    if chosen is None:
        return
    for name, cells in (
        ("95% interval", [_interval(point) for point in chosen.points]),
        ("recovery", [_share(point.recovery) for point in chosen.points]),
        ("top-1", [_share(point.top1) for point in chosen.points]),
    ):
        out.note(f"{task.policy}, {name}: {', '.join(cells)}", level=1)


def _show_speed(out: Output, speed: Speed) -> None:
    prefill = ", ".join(f"{rate:,.0f} at {tokens:,}" for tokens, rate in speed.prefill)
    rates = [
        f"{rate_text(rate, 'bytes')} from the {where}"
        for where, rate in (("page cache", speed.warm), ("disk", speed.cold))
        if rate
    ]
    out.line(f"full prefill, tokens/s: {prefill}; stored KV: {', '.join(rates) or 'unknown'}")


def show_table(out: Output, blueprint: Blueprint, speed: Speed, ratios: Sequence[Decimal]) -> None:
    """For each medium and ratio whether loading a layer hides behind recomputing one."""
    from engine.calibration.controller import MEDIA, Prompt, device_table, enough_bandwidth

    prompt = Prompt(*STANDARD)
    here = [("this disk", speed.cold), ("this page cache", speed.warm)]
    media = sorted(
        [*MEDIA, *((name, rate) for name, rate in here if rate)], key=lambda medium: medium[1]
    )
    cells = device_table(speed, prompt, ratios, media)
    enough = {str(ratio): enough_bandwidth(speed, prompt, ratio) for ratio in ratios}
    if out.json:
        out.data(
            {
                "schema": 1,
                "model": {
                    "name": blueprint.name,
                    "dtype": blueprint.dtype,
                    "kv_dtype": blueprint.kv_dtype,
                    "device": str(blueprint.device),
                },
                "prompt": {
                    "tokens": prompt.tokens,
                    "cached": prompt.cached,
                    "loaded": prompt.loaded,
                },
                "cells": [asdict(cell) for cell in cells],
                "enough": enough,
            }
        )
        return
    out.line(
        f"{blueprint.name}, {blueprint.precision} on {blueprint.device}: a layer of a prompt of "
        f"{count_text(prompt.tokens, 'tokens')}, recomputed at a ratio, loaded from a medium"
    )
    headers = ["medium", "bandwidth", "load", *(f"{ratio}" for ratio in ratios)]
    rows: list[tuple[object, ...]] = []
    first = cells[: len(ratios)]
    rows.append(("", "", "recompute", *(duration(cell.recompute_s) for cell in first)))
    for start in range(0, len(cells), len(ratios)):
        row = cells[start : start + len(ratios)]
        rate = rate_text(row[0].bandwidth, "bytes")
        marks = ("hidden" if cell.hidden else "waited for" for cell in row)
        rows.append((row[0].medium, rate, duration(row[0].load_s), *marks))
    rows.append(("", "", "enough", *(rate_text(rate, "bytes") for rate in enough.values())))
    out.table(headers, rows, right=headers[1:])


def duration(seconds: float) -> str:
    """Short times with a decimal, others as everywhere."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.01 else duration_text(seconds)


def _near(curve: Curve, ratio: Decimal) -> Point:
    return min(curve.points, key=lambda point: abs(point.ratio - float(ratio)))


def _interval(point: Point) -> str:
    if point.kl_low is None or point.kl_high is None:
        return f"{point.ratio:g}: unknown"
    return f"{point.ratio:g}: {point.kl_low:.4f} to {point.kl_high:.4f}"


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
