"""Two runs beside each other, or a run beside full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from cbcli.inspect.lines import Line, Span, bar, left, line, right, safe, span, table, wrap
from cbcli.inspect.run import Run, ms, percent
from cbcli.inspect.theme import Look
from cbcli.text import one_line, shorten
from engine.trace.record import AnswerToken

Answer = Sequence[AnswerToken]
Place = tuple[str, int, int]  # chunk id, which time it is in the prompt, offset in it


@dataclass(frozen=True)
class Selected:
    """Tokens recomputed in both runs, in one alone, in the other alone, and cached in both."""

    both: tuple[Place, ...]
    one: tuple[Place, ...]
    other: tuple[Place, ...]
    common: int


def places(run: Run) -> dict[Place, int]:
    """The prompt position of each cached token, by what doesn't change with the chunks' order."""
    found: dict[Place, int] = {}
    seen: dict[str, int] = {}
    for segment in run.chunks:
        name = segment.chunk_id or segment.name
        time = seen[name] = seen.get(name, -1) + 1
        if segment.status in ("exact", "hit"):
            found |= {(name, time, at): segment.start + at for at in range(segment.tokens)}
    return found


def selected(one: Run, other: Run) -> Selected:
    """Which cached tokens were recomputed where; chunks may stand in another order."""
    mine, theirs = places(one), places(other)
    ours = {place for place, at in mine.items() if one.selected[at]}
    others = {place for place, at in theirs.items() if other.selected[at]}
    return Selected(
        tuple(sorted(ours & others)),
        tuple(sorted(ours - others)),
        tuple(sorted(others - ours)),
        len(mine.keys() & theirs.keys()),
    )


def first_difference(one: Answer, other: Answer) -> int | None:
    """The first token in which two answers differ; None where they are the same."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine.id != theirs.id:
            return number
    return None if len(one) == len(other) else min(len(one), len(other))


def differing(one: Answer, other: Answer) -> tuple[list[bool], list[bool]]:
    """For every token of two answers whether it has no like in the other."""
    marks = [True] * len(one), [True] * len(other)
    matcher = SequenceMatcher(None, [t.id for t in one], [t.id for t in other], autojunk=False)
    for at, there, size in matcher.get_matching_blocks():
        for offset in range(size):
            marks[0][at + offset] = marks[1][there + offset] = False
    return marks


def answer_lines(answer: Answer, marks: Sequence[bool], columns: int, look: Look) -> list[Line]:
    """An answer wrapped, what differs underlined; in ASCII between brackets."""
    shown: list[Line] = []
    parts: list[Span] = []
    used = 0
    for token, differs in zip(answer, marks, strict=True):
        role = "sel bad" if differs else ""
        text = token.text
        for number, piece in enumerate(text.split("\n")):
            if number:
                shown.append(tuple(parts))
                parts, used = [], 0
            if not piece:
                continue
            piece = safe(piece)
            if look.ascii:
                piece = piece.encode("ascii", "backslashreplace").decode()
                piece = f"[{piece}]" if differs else piece
            for word in _pieces(piece, columns):
                if used + word[1] > columns:
                    shown.append(tuple(parts))
                    parts, used = [], 0
                parts.append(Span(word[0], role))
                used += word[1]
    shown.append(tuple(parts))
    return shown


def _pieces(text: str, columns: int) -> list[tuple[str, int]]:
    from rich.cells import cell_len, chop_cells

    return [(part, cell_len(part)) for part in chop_cells(text, columns)]


def fact_lines(one: Run, other: Run | None, columns: int) -> list[Line]:
    """The settings and figures of both, in a table."""
    room = max(12, (columns - 18) // (2 if other else 1))
    runs = [one] if other is None else [one, other]
    rows: list[list[str | Span]] = []

    def add(name: str, values: list[str]) -> None:
        if any(values):
            differ = len(set(values)) > 1
            cells: list[str | Span] = [
                span(shorten(one_line(value), room), "bold" if differ else "") for value in values
            ]
            rows.append([span(name, "dim"), *cells])

    add("run", [run.trace.id for run in runs])
    add("way", [run.way for run in runs])
    add("check layers", [",".join(map(str, run.result["check_layers"])) for run in runs])
    add("chunks", [" ".join(str(s.name) for s in run.chunks) for run in runs])
    add("recomputed", [_recomputed(run) for run in runs])
    add("first token", [ms(run.result["timing"]["ttft_s"]) for run in runs])
    compares = [run.result.get("compare") for run in runs]
    add("full prefill", [f"{ms(c['ttft_s'])}, {c['speedup']:.2f}x" if c else "" for c in compares])
    add("mean KL", [f"{c['kl_mean']:.4f} nats" if c else "" for c in compares])
    add("top-1", [f"{100 * c['top1_agreement']:.0f}%" if c else "" for c in compares])
    heads = ["", "A", "B"] if other is not None else ["", ""]
    return table(heads, rows)


def _recomputed(run: Run) -> str:
    done = run.result["recomputed"]
    return f"{done['tokens']:,} of {int(run.cached.sum()):,} ({100 * done['fraction']:.1f}%)"


def kl_lines(one: Run, other: Run | None, look: Look, columns: int) -> list[Line]:
    """KL at each token of full prefill's answer, a line a token."""
    references = [run.trace.reference for run in ((one,) if other is None else (one, other))]
    if not any(references):
        return [line(span("KL per token needs runs with --compare", "dim"))]
    known = [n for ref in references for n, token in enumerate(ref) if token.kl is not None]
    longest = max(references, key=len)[: max(known, default=-1) + 1]
    most = max((t.kl or 0 for ref in references for t in ref), default=0)
    room = max(6, (columns - 24) // len(references) - 9)
    shown = []
    if other is not None:
        head = [Span(" " * 22), Span(left("A", room + 9), "one"), Span("B", "other")]
        shown.append(tuple(head))
    for number in range(len(longest)):
        text = left(safe(longest[number].text) or " ", 14)
        parts = [Span(right(str(number), 4) + "  ", "dim"), Span(text + "  ")]
        for side, reference in enumerate(references):
            kl = reference[number].kl if number < len(reference) else None
            filled = bar((kl or 0) / most if most else 0, room, look.ascii)
            role = ("one", "other")[side]
            parts.append(Span(right("-" if kl is None else f"{kl:.4f}", 7) + " "))
            parts.append(Span(left(filled, room) + " ", role))
        shown.append(tuple(parts))
    return shown


def selection_lines(one: Run, other: Run, columns: int) -> list[Line]:
    """How the selections differ, and the tokens that only one of them has."""
    found = selected(one, other)
    union = len(found.both) + len(found.one) + len(found.other)
    shown = [
        line(
            Span(f"{len(found.both):,} in both", "both"),
            Span(f", {len(found.one):,} in A alone", "one"),
            Span(f", {len(found.other):,} in B alone", "other"),
            Span(f"; {percent(len(found.both), union)} of those in either", "dim"),
        )
    ]
    shown += _by_chunk(one, other, found)
    for name, role, run, only in (
        ("A alone", "one", one, found.one),
        ("B alone", "other", other, found.other),
    ):
        if not only:
            continue
        at = places(run)
        words = " ".join(_word(run, at[place]) for place in only[:60])
        more = f" and {len(only) - 60:,} more" if len(only) > 60 else ""
        for number, text in enumerate(wrap(words + more, max(10, columns - 10))):
            shown.append(line(Span(left(name if not number else "", 10), role), Span(text)))
    return shown


def _by_chunk(one: Run, other: Run, found: Selected) -> list[Line]:
    """How many tokens of each chunk were recomputed where; chunks in A's order, then B's."""
    counts: dict[tuple[str, int], list[int]] = {}
    for column, taken in enumerate((found.both, found.one, found.other)):
        for name, time, _ in taken:
            counts.setdefault((name, time), [0, 0, 0])[column] += 1
    names: dict[str, str] = {}
    for run in (one, other):
        names |= {s.chunk_id: s.name for s in run.chunks if s.chunk_id}
    order = {key: at for at, key in enumerate(_keys(one) + _keys(other))}
    rows: list[list[str | Span]] = []
    for key in sorted(counts, key=lambda key: order.get(key, len(order))):
        both, mine, theirs = counts[key]
        rows.append(
            [
                names.get(key[0], key[0][:12]),
                span(f"{both:,}", "both"),
                span(f"{mine:,}", "one"),
                span(f"{theirs:,}", "other"),
            ]
        )
    return table(["chunk", "in both", "A alone", "B alone"], rows, "lrrr") if rows else []


def _keys(run: Run) -> list[tuple[str, int]]:
    """Chunks with which time each is in the prompt, in order."""
    seen: dict[str, int] = {}
    keys = []
    for segment in run.chunks:
        name = segment.chunk_id or segment.name
        seen[name] = seen.get(name, -1) + 1
        keys.append((name, seen[name]))
    return keys


def _word(run: Run, token: int) -> str:
    low, high = run.trace.tokens.span(token)
    return safe(run.trace.tokens.text[low:high].decode("utf-8", "replace")).strip() or "·"
