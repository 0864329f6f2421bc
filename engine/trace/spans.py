"""What a stopwatch has of each layer, when all is done or while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.trace.record import LayerSpan

if TYPE_CHECKING:
    from engine.timing import Stopwatch


def spans_of(
    watch: Stopwatch, began: float, layers: int, now: float | None = None
) -> tuple[LayerSpan, ...]:
    """The layers of a prefill that began at `began`.

    now: while it runs, the seconds of `time.perf_counter`; what has not been done yet is 0 then,
    and a layer whose turn is still to come starts `now`. Any thread may ask.
    """
    spans = []
    until = watch.logits or (now or 0.0)
    timed = bool(watch.recompute.laps or watch.reads or watch.loads)
    for layer in range(layers):
        start = watch.starts.get(layer, until) if now is not None else watch.starts[layer]
        through = watch.starts.get(layer + 1, until)
        load_start, load_s = watch.loads.get(layer, (start, 0.0))
        read = watch.reads.get(layer)
        # A full prefill is timed as a whole, and does nothing else.
        whole = 0.0 if timed else through - start
        spans.append(
            LayerSpan(
                start_s=start - began,
                load_start_s=load_start - began,
                load_s=load_s,
                stall_s=watch.stalls.get(layer, 0.0),
                rotate_s=watch.rotate.laps.get(layer, 0.0),
                score_s=watch.score.laps.get(layer, 0.0),
                recompute_s=watch.recompute.laps.get(layer, whole),
                read_start_s=None if read is None else read - began,
            )
        )
    return tuple(spans)
