"""What the Knobs and Chunks views show, and how a wish is changed: no widgets here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from cbcli.inspect.lines import Line, Span, bar, left, line, right, span
from cbcli.inspect.run import Run, ms
from cbcli.inspect.runner import CONTEXTS, POLICIES, StoredChunk, Wish
from cbcli.inspect.theme import Look
from cbcli.settings import Settings
from cbcli.units import size_text

KNOBS = ("question", "ratio", "policy", "check layer", "context", "compare")
LABEL = 14
ORDERS = ("document", "tokens", "KV", "hits")  # of the chunks, by their columns


@dataclass(frozen=True)
class Place:
    """Where the cursor of Knobs is: a knob's name, or the chunk of that number."""

    knob: str = ""
    chunk: int = -1


def wish_of(run: Run, context: str = CONTEXTS[0]) -> Wish:
    """The wish that gives this run again. context: that of the settings, which no trace has."""
    result = run.result
    ratios, layers = result["ratios"], result["check_layers"]
    policy = str(result["policy"])
    return Wish(
        run.trace.question,
        tuple(segment.chunk_id for segment in run.chunks if segment.chunk_id),
        float(ratios[0]) if ratios else 0.16,
        policy if policy != "explicit" else POLICIES[0],
        max(1, int(layers[0])) if layers else 1,
        context,
        compare=result.get("compare") is not None,
    )


def wish_as_set(question: str, chunks: Sequence[str], settings: Settings) -> Wish:
    """The wish for a question, with all that the settings say and Knobs can turn."""
    wish = Wish(question, tuple(chunks), context=settings.context)
    if isinstance(settings.ratio, tuple) and settings.ratio:
        wish = replace(wish, ratio=float(settings.ratio[0]))
    if settings.policy in POLICIES:
        wish = replace(wish, policy=settings.policy)
    if settings.check_layers:
        wish = replace(wish, check_layer=max(1, settings.check_layers[0]))
    return wish


def places(wish: Wish) -> list[Place]:
    """All places of the cursor, from the top."""
    return [*(Place(knob) for knob in KNOBS), *(Place(chunk=n) for n in range(len(wish.chunks)))]


def turned(wish: Wish, knob: str, step: int) -> Wish:
    """The wish with a knob turned by so many steps; what has an end stays at it."""
    if knob == "ratio":
        return replace(wish, ratio=min(1.0, max(0.0, round(wish.ratio + step * 0.01, 2))))
    if knob == "check layer":
        return replace(wish, check_layer=max(1, wish.check_layer + step))
    if knob == "policy":
        return replace(wish, policy=_next(POLICIES, wish.policy, step))
    if knob == "context":
        return replace(wish, context=_next(CONTEXTS, wish.context, step))
    return replace(wish, compare=not wish.compare) if knob == "compare" else wish


def _next(names: Sequence[str], name: str, step: int) -> str:
    at = names.index(name) if name in names else 0
    return names[(at + (1 if step > 0 else -1)) % len(names)]


def moved(wish: Wish, number: int, step: int) -> Wish:
    """With a chunk moved up or down; unchanged at the ends."""
    other = number + step
    if not (0 <= number < len(wish.chunks) and 0 <= other < len(wish.chunks)):
        return wish
    chunks = list(wish.chunks)
    chunks[number], chunks[other] = chunks[other], chunks[number]
    return replace(wish, chunks=tuple(chunks))


def toggled(wish: Wish, chunk_id: str) -> Wish:
    """With a chunk at the end, or without it where it is there."""
    if chunk_id in wish.chunks:
        return replace(wish, chunks=tuple(c for c in wish.chunks if c != chunk_id))
    return replace(wish, chunks=(*wish.chunks, chunk_id))


def knob_lines(
    wish: Wish, at: Place, names: Mapping[str, str], look: Look, columns: int
) -> list[Line]:
    """A line a place, in the order of `places`, with a head before the chunks. names: of chunks."""
    room = max(10, columns - LABEL - 12)
    values = {
        "question": wish.question or "(none: Enter writes one)",
        "ratio": f"{_ratio_text(wish.ratio)}  {bar(wish.ratio, min(40, room - 6), look.ascii)}",
        "policy": wish.policy,
        "check layer": str(wish.check_layer),
        "context": wish.context,
        "compare": "with full prefill" if wish.compare else "no",
    }
    shown: list[Line] = []
    for knob in KNOBS:
        mine = at.knob == knob
        sign, end = ("< ", " >") if mine and knob != "question" else ("  ", "")
        role = "recompute" if knob == "ratio" else "bold"
        shown.append(
            line(
                Span("> " if mine else "  ", "key"),
                span(left(knob, LABEL), "key" if mine else "dim"),
                Span(sign, "key"),
                span(values[knob], role),
                Span(end, "key"),
            )
        )
    head = "Chunks, in their order" if wish.chunks else "Chunks: those that the question retrieves"
    shown.append(line(span("  " + head, "title")))
    for number, chunk in enumerate(wish.chunks):
        mine = at.chunk == number
        name = names.get(chunk, "")
        shown.append(
            line(
                Span("> " if mine else "  ", "key"),
                Span(right(str(number + 1), 3) + "  "),
                span(f"{chunk[:12]}  ", "dim"),
                span(name, "bold" if mine else ""),
            )
        )
    return shown


def _ratio_text(ratio: float) -> str:
    """0.16, and 0.005 where it is that."""
    return f"{ratio:.2f}" if round(ratio, 2) == ratio else f"{ratio:g}"


def history_lines(runs: Sequence[Run], current: int, columns: int) -> list[Line]:
    """The runs of the session, a line each."""
    shown: list[Line] = [line(span("Runs", "title"))]
    heads = f"{'':4}{'first token':>12}{'full':>8}{'KL':>9}  way"
    shown.append(line(span(heads, "dim")))
    for number, run in enumerate(runs):
        compare = run.result.get("compare")
        mine = number == current
        times = f"{compare['speedup']:.1f}x" if compare else ""
        kl = f"{compare['kl_mean']:.4f}" if compare else ""
        text = f"{ms(run.result['timing']['ttft_s']):>12}{times:>8}{kl:>9}  {run.way}"
        sign = Span((">" if mine else " ") + right(str(number + 1), 2) + " ", "key")
        shown.append(line(sign, span(text, "bold" if mine else "")))
    return shown


def matching(chunks: Sequence[StoredChunk], text: str) -> list[StoredChunk]:
    """The chunks with `text` in their text, source or id, capital letters or not."""
    wanted = text.casefold()
    return [
        chunk
        for chunk in chunks
        if wanted in chunk.text.casefold()
        or wanted in chunk.source.casefold()
        or chunk.chunk_id.startswith(wanted)
    ]


def in_order(chunks: Sequence[StoredChunk], order: str) -> list[StoredChunk]:
    """The documents' order, or the most of a column first; equal ones as they were."""
    if order == "document":
        return list(chunks)
    amounts = {"tokens": lambda c: c.tokens, "KV": lambda c: c.size, "hits": lambda c: c.hits}
    return sorted(chunks, key=amounts[order], reverse=True)


def chunk_head(columns: int, order: str = ORDERS[0]) -> Line:
    """What stands above the chunks; the column they are sorted by is marked."""
    parts = [Span(" " * 5), Span(left("document", _name_room(columns)), "dim")]
    for title, size in (("tokens", 8), ("KV", 9), ("hits", 6)):
        parts.append(Span(f"{title:>{size}}", "key" if title == order else "dim"))
    return (*parts, Span("  text", "dim"))


def chunk_line(chunk: StoredChunk, wish: Wish, columns: int, *, mine: bool = False) -> Line:
    """A chunk: its number in the wish, document, tokens, bytes, hits, text. mine: the cursor is
    on it."""
    name = _name_room(columns)
    order = str(wish.chunks.index(chunk.chunk_id) + 1) if chunk.chunk_id in wish.chunks else ""
    place = f" {chunk.ordinal + 1}"
    source = left(span(chunk.source.rsplit("/", 1)[-1]).text, name - len(place))
    numbers = f"{chunk.tokens:>8,}{size_text(chunk.size):>9}{chunk.hits:>6,}  "
    return line(
        Span(("> " if mine else "  "), "key"),
        Span(right(order, 2) + " ", "good"),
        span(source.rstrip() + place, "bold" if mine or order else ""),
        Span(" " * (name - len(place) - cell_len(source.rstrip()))),
        Span(numbers, "dim"),
        span(chunk.text[:200]),
    )


def _name_room(columns: int) -> int:
    return max(12, min(30, columns // 4))
