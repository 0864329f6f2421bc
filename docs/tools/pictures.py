"""Draws the pictures of docs/explanation: `python docs/tools/pictures.py`.

SVG, written by hand: small, with colours that can be told apart, for light and dark pages alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "explanation"
STYLE = """
.page { fill: #fff } text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px } .mid { text-anchor: middle } .end { text-anchor: end }
.loaded { fill: #9ecae1 } .again { fill: #d95f02 } .new { fill: #4d4d4d } .exact { fill: #66c2a5 }
.line { stroke: #57606a; fill: none; stroke-width: 1.5 }
.faint { stroke: #8c959f; stroke-dasharray: 3 3 } .tip { fill: #57606a }
.arrow { stroke: #57606a; fill: none; stroke-width: 1.5; marker-end: url(#tip) }
.key { stroke-width: 3; fill: none } .before { stroke: #3182bd } .after { stroke: #d95f02 }
@media (prefers-color-scheme: dark) {
.page { fill: #161b22 } text { fill: #e6edf3 } .new { fill: #c9d1d9 }
.line, .arrow { stroke: #9198a1 } .tip { fill: #9198a1 } .loaded { fill: #3f6f8f } }
"""
TIP = (
    '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker>'
)
CELL, GAP, ROW = 13, 2, 15


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><title>{title}</title>'
        f"<style>{STYLE}</style><defs>{TIP}</defs>\n"
        f'<rect class="page" width="{width}" height="{height}" rx="6"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, said: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{said}</text>'


def cell(x: float, y: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{CELL}" height="{CELL}" rx="2"/>'


def arrow(*points: tuple[float, float]) -> str:
    return f'<path class="arrow" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>'


def legend(x: float, y: float, rows: Iterable[tuple[str, str]]) -> list[str]:
    parts = []
    for kind, said in rows:
        parts += [cell(x, y - 11, kind), text(x + CELL + 6, y, said, "small")]
        x += CELL + 24 + 6.3 * len(said)
    return parts


def blend() -> str:
    """Layers and tokens of one prompt: what is loaded, and what is computed."""
    runs = [("prefix", 4), ("chunk C", 9), ("chunk A", 9), ("chunk B", 9), ("question", 5)]
    chosen = {15, 16, 20, 25, 26}  # places of tokens that are computed again
    parts, place, x = [], 0, 60.0
    for name, tokens in runs:
        parts.append(text(x + tokens * (CELL + GAP) / 2, 24, name, "mid"))
        for _ in range(tokens):
            for layer in range(6):
                kind = "exact" if name == "prefix" or place < 13 else "loaded"
                kind = "again" if place in chosen else "new" if name == "question" else kind
                parts.append(cell(x, 34 + (5 - layer) * ROW, kind))
            x += CELL + GAP
            place += 1
        x += 10
    parts += [text(50, 45, "layer 6", "end small"), text(50, 120, "layer 1", "end small")]
    parts.append(arrow((60, 142), (x - 10, 142)))
    parts.append(text((50 + x) / 2, 159, "tokens of the prompt, by position", "mid small"))
    rows = [("exact", "loaded, exact"), ("loaded", "loaded, approximate")]
    rows += [("again", "loaded, then recomputed"), ("new", "always computed")]
    return svg(
        round(x + 6), 194, "What a blend loads and computes", [*parts, *legend(60, 184, rows)]
    )


def rope() -> str:
    """A stored key is turned from its place in the store to its place in the prompt."""
    parts = []
    for number, (x, said, angle, kind) in enumerate(
        [
            (90, "K as stored: not turned", 0.0, "before"),
            (290, "chunk first: position 40", 0.9, "after"),
            (490, "chunk third: position 1,200", 2.5, "after"),
        ]
    ):
        parts.append(f'<circle class="line faint" cx="{x}" cy="90" r="58"/>')
        for shift, length in ((0.0, 52), (0.5, 40)):
            tip = x + length * math.cos(angle + shift), 90 - length * math.sin(angle + shift)
            parts.append(f'<path class="key {kind}" d="M{x} 90L{tip[0]:.1f} {tip[1]:.1f}"/>')
        parts.append(text(x, 172, said, "mid small"))
        if number:
            end = x + 58 * math.cos(angle), 90 - 58 * math.sin(angle)
            parts.append(
                f'<path class="arrow" d="M{x + 58} 90A58 58 0 0 0 {end[0]:.1f} {end[1]:.1f}"/>'
            )
    parts.append(text(290, 18, "two keys of a chunk keep their angle to each other", "mid"))
    parts += [arrow((155, 90), (222, 90)), arrow((355, 90), (422, 90))]
    return svg(580, 186, "Keys are turned to the place where a chunk stands", parts)


def attention() -> str:
    """Who sees whom: in a chunk alone, in a full prefill, and of a recomputed token."""
    parts, size, count = [], 12, 12
    seen = {"alone": 20.0, "full": 220.0, "blend": 420.0}
    titles = {"alone": "stored: each chunk alone", "full": "full prefill", "blend": "blend"}
    for name, left in seen.items():
        parts.append(text(left + 72, 20, titles[name], "mid"))
        for row in range(count):
            for column in range(row + 1):
                same = row // 4 == column // 4
                kind = {"alone": "loaded" if same else "", "full": "new"}.get(name, "")
                if name == "blend":
                    again = row in (5, 10)
                    kind = "again" if again else "loaded" if same else ""
                if kind:
                    y = 30 + row * size
                    parts.append(
                        f'<rect class="{kind}" x="{left + column * size:g}" y="{y}" '
                        f'width="{size - 1}" height="{size - 1}"/>'
                    )
    parts.append(text(92, 192, "no chunk sees another", "mid small"))
    parts.append(text(292, 192, "each token sees all before it", "mid small"))
    parts.append(text(492, 192, "two tokens see all before them", "mid small"))
    return svg(590, 204, "What a token attends to", parts)


def selection() -> str:
    """The question reads the stored KV once; what it looks at most is computed again."""
    scores = [3, 5, 4, 9, 30, 44, 12, 5, 3, 6, 26, 8, 4, 3, 5, 11, 38, 22, 6, 4, 3, 5, 4, 7]
    cut = sorted(scores)[-4]
    parts, x = [], 60.0
    for number, score in enumerate(scores):
        if number and number % 8 == 0:
            x += 10
        kind = "again" if score >= cut else "loaded"
        parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{90 - score}" width="13" height="{score}"/>'
        )
        parts.append(cell(x, 96, kind))
        x += 15
    parts.append(
        text(60, 24, "how much the question attends to a stored token, times the size of its V")
    )
    for start in (120, 250, 380):
        parts.append(text(start, 130, "chunk", "mid small"))
    for n in range(4):
        parts.append(cell(x + 20 + n * 15, 96, "new"))
    parts.append(text(x + 50, 130, "question", "mid small"))
    parts.append(f'<path class="arrow" d="M{x + 45} 90C{x + 30} 30 {x - 60} 40 {x - 88} 48"/>')
    rows = [
        ("again", "the highest 16 %: recomputed"),
        ("loaded", "the others: moved with their neighbours"),
    ]
    return svg(round(x + 96), 164, "How tokens are chosen", [*parts, *legend(60, 154, rows)])


def main() -> None:
    for draw in (blend, rope, attention, selection):
        (FOLDER / f"{draw.__name__}.svg").write_text(draw(), "utf-8")


if __name__ == "__main__":
    main()
