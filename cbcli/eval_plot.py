"""The pictures of `eval --plot`: quality over recompute ratio, and over speedup."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cbcli.eval_report import differences, more_text

if TYPE_CHECKING:
    from engine.evaluation.report import ArmRow, Report

# Okabe and Ito's colours, which people who see colours otherwise can tell apart; random is grey.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X")
METADATA = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def draw(report: Report, path: Path) -> None:
    """Writes the picture of a report; it is the same for the same report."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from engine.evaluation.report import curves

    with rc_context({"svg.hashsalt": "cacheblend", "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        apart = differences(report.rows)
        for number, points in enumerate(curves(report.rows)):
            row = next(row for row in points if row.policy is not None)
            name = " ".join([str(row.policy), *more_text(row, apart)])
            style = _style(row, number)
            _line(left, points, [row.ratio or 0.0 for row in points], name, style)
            _line(right, points, [row.speedup for row in points], name, style)
        _finish(left, "recompute ratio")
        _finish(right, "speedup of the first token over full prefill")
        data = report.data
        figure.suptitle(
            f"{report.model.name}, {report.model.precision}: {data.questions} questions, "
            f"prompts of {data.tokens:,.0f} tokens; bands: 95% of resampled questions",
            fontsize=10,
            parse_math=False,  # a model may be named anything
        )
        figure.savefig(path, dpi=150, metadata=METADATA.get(path.suffix.lower()))


def _style(row: ArmRow, number: int) -> dict[str, Any]:
    if row.policy == "random":
        return {"color": "#888888", "linestyle": "--", "marker": "x"}
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def _line(
    axes: Any, points: Sequence[ArmRow], at: list[float], name: str, style: dict[str, Any]
) -> None:
    axes.plot(at, [row.kl for row in points], label=name, markersize=5, linewidth=1.5, **style)
    if all(row.kl_low is not None for row in points):
        axes.fill_between(
            at,
            [row.kl_low for row in points],
            [row.kl_high for row in points],
            color=style["color"],
            alpha=0.12,
            linewidth=0,
        )


def _finish(axes: Any, x: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel("mean KL from full prefill, nats")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        for text in axes.legend(fontsize=8).get_texts():
            text.set_parse_math(False)
