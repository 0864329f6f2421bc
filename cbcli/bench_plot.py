"""The pictures of `bench ttft --plot`: time over prompt length, and speedup over ratio."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache_store.errors import UsageError

if TYPE_CHECKING:
    from engine.bench.report import Report
    from engine.bench.ttft import TtftRow

FORMATS = (".svg", ".png")


def check_plot(path: Path, formats: Sequence[str] = FORMATS) -> None:
    """Raises UsageError for another kind of file, and where matplotlib is not installed."""
    if path.suffix.lower() not in formats:
        raise UsageError(
            f"--plot {path}: not a {' or '.join(formats)} file", f"name it so: picture{formats[0]}"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", "pip install 'cacheblend[plot]'")


def draw(report: Report, path: Path) -> None:
    """Writes the picture of a TTFT report; it is the same for the same report."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "cacheblend", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        rows: list[TtftRow] = list(report.rows)
        _over_length(left, rows)
        _over_ratio(right, rows)
        at, model = report.conditions, report.model
        figure.suptitle(
            f"{model.name}, {model.precision} on {at.cpu if at.device == 'cpu' else at.device}, "
            f"{at.threads} threads, medians of {report.pairs} rounds",
            fontsize=10,
            parse_math=False,  # a model may be named anything
        )
        figure.savefig(
            path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None
        )


def _over_length(axes: Any, rows: list[TtftRow]) -> None:
    """Time to first token: full prefill, every peer, reuse, and the first policy's blends."""
    from matplotlib.ticker import LogLocator

    policies = [row.policy for row in rows if row.policy is not None]
    loader = next((row.loader for row in rows if row.loader is not None), None)
    series: dict[str, list[TtftRow]] = {}
    for row in rows:
        if row.loader not in (None, loader) or row.policy not in (None, *policies[:1]):
            continue
        name = "full prefill" if row.way == "full" else row.way
        if row.policy is not None:
            name = f"blend {row.policy} {row.ratio:g}"
        series.setdefault(name, []).append(row)
    for name, points in series.items():
        ours = points[0].bound is not None
        middle = [row.median_s for row in points]
        below = [row.median_s - row.min_s for row in points]
        above = [row.max_s - row.median_s for row in points]
        axes.errorbar(
            [row.tokens for row in points],
            middle,
            yerr=[below, above],
            marker="o" if ours else "s",
            linestyle="-" if ours else "--",
            color="black" if points[0].way == "full" else None,
            capsize=3,
            label=name,
        )
    lengths = sorted({row.tokens for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    _finish(axes, "prompt tokens", "time to first token, s")


def _over_ratio(axes: Any, rows: list[TtftRow]) -> None:
    """Speedup over full prefill at the longest prompt, each policy with its bound, dashed."""
    longest = max(row.tokens for row in rows)
    blends = [row for row in rows if row.tokens == longest and row.way == "blend"]
    loader = blends[0].loader if blends else None
    for number, policy in enumerate(dict.fromkeys(row.policy for row in blends)):
        points = [row for row in blends if row.policy == policy and row.loader == loader]
        ratios, color = [row.ratio for row in points], f"C{number}"
        middle = [row.speedup for row in points]
        below = [row.speedup - row.speedup_min for row in points]
        above = [row.speedup_max - row.speedup for row in points]
        axes.errorbar(
            ratios, middle, yerr=[below, above], marker="o", capsize=3, color=color, label=policy
        )
        axes.plot(
            ratios,
            [row.bound for row in points],
            linestyle="--",
            marker="_",
            color=color,
            label=f"{policy}: bound",
        )
    axes.set_ylim(bottom=0)
    axes.set_title(f"{longest:,} tokens", fontsize=10)
    _finish(axes, "recompute ratio", "full prefill / blend")


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
