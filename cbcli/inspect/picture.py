"""Pictures of a run without a terminal: the screen as SVG, and plots of layers and time."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from cbcli.inspect.layermap import sources
from cbcli.inspect.run import Run
from cbcli.inspect.theme import Look, style_of
from cbcli.inspect.waterfall import PARTS, WORDS, pieces, ways
from engine.trace.heat import pooled
from engine.trace.record import Trace

LOOK = Look(dark=False)


def screen(
    traces: Sequence[Trace],
    view: str,
    size: tuple[int, int],
    *,
    at: int | None = None,
    dark: bool = True,
    ascii: bool = False,
) -> str:
    """The SVG that `s` would save of a terminal of `size` (columns, lines)."""
    from cbcli.inspect.app import InspectApp

    async def draw() -> str:
        app = InspectApp(traces, view=view, at=at, dark=dark, ascii=ascii)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            return app.export_screenshot(title=app.TITLE)

    return asyncio.run(draw())


def plot(run: Run) -> bytes:
    """A PNG of the map of layers and tokens, the waterfall and what it is compared with. Needs
    matplotlib."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(11, 9), layout="constrained")
        FigureCanvasAgg(figure)
        found = ways(run)
        upper, middle, lower = figure.subplots(3, 1, height_ratios=[6, 6, 0.5 + 0.4 * len(found)])
        _map(figure, upper, run)
        _waterfall(middle, run)
        for number, way in enumerate(found):
            colour = style_of(way.role, LOOK).color
            lower.barh(number, way.seconds * 1000, color=colour.name if colour else None)
        lower.set_yticks(range(len(found)), [way.name for way in found])
        lower.invert_yaxis()
        lower.set_xlabel("time to first token, ms")
        figure.suptitle(
            f"{run.result['model']['name']}: {run.way}, {run.count:,} tokens",
            parse_math=False,  # a model may be named anything
        )
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=130, metadata={"Software": None})
    return out.getvalue()


def _map(figure: Any, axes: Any, run: Run) -> None:
    from matplotlib.colors import LogNorm, Normalize

    source = sources(run)[0]
    small = pooled(source.values, 800)
    known = small[np.isfinite(small) & (small > 0)]
    high = float(known.max()) if len(known) else 1.0
    low = float(np.median(known)) if len(known) else high
    norm = Normalize(0, 1) if source.share or low >= high else LogNorm(low, high, clip=True)
    drawn = axes.imshow(
        small,  # what is not a number is left blank
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        norm=norm,
        extent=(0, run.count, len(source.layers), 0),
    )
    figure.colorbar(drawn, ax=axes, label=source.title)
    at = range(0, len(source.layers), max(1, len(source.layers) // 10))
    axes.set_yticks([row + 0.5 for row in at], [str(source.layers[row]) for row in at])
    axes.set_xlabel("token")
    axes.set_ylabel("layer")
    for segment in run.chunks:
        axes.axvline(segment.start, color="#888888", linewidth=0.6)


def _waterfall(axes: Any, run: Run) -> None:
    named: set[str] = set()
    for number, layer in enumerate(run.trace.spans):
        for piece in pieces(layer):
            colour = style_of(piece.part, LOOK).color
            axes.barh(
                number,
                (piece.end - piece.start) * 1000,
                left=piece.start * 1000,
                height=0.35 if piece.part == "load" else 0.85,
                color=colour.name if colour else None,
                label=None if piece.part in named else WORDS[piece.part],
            )
            named.add(piece.part)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the prefill's start")
    axes.set_ylabel("layer")
    if named:
        order = [WORDS[part] for part in PARTS]
        pairs = zip(*axes.get_legend_handles_labels(), strict=True)
        shown = sorted(pairs, key=lambda pair: order.index(pair[1]))
        axes.legend([handle for handle, _ in shown], [name for _, name in shown])
