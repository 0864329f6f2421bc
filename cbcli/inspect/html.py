"""A run as a page of its own: token map, waterfall, figures; no scripts, nothing from outside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from cbcli.inspect.heat import STEPS, heat_of
from cbcli.inspect.layermap import layer_facts
from cbcli.inspect.lines import safe
from cbcli.inspect.run import Run, ms, number_text
from cbcli.inspect.tables import token_rows
from cbcli.inspect.theme import Look, style_of
from cbcli.inspect.versus import first_difference
from cbcli.inspect.waterfall import PARTS, WORDS, extent, pieces, totals, ways
from cbcli.text import visible

STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;
background:#fbfbf9;color:#1d2026}
h1{font-size:1.3em}h2{font-size:1.05em;margin-top:2em}
.text{font:13px/1.75 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
border-left:4px solid;padding:.1em .8em;margin:.2em 0 1em}
.s{text-decoration:underline 2px;text-underline-offset:3px;font-weight:600}
.d{color:#777}table{border-collapse:collapse;font-size:13px}td,th{padding:.1em .8em .1em 0;
text-align:left}td.n,th.n{text-align:right}svg{width:100%;height:auto;display:block}
svg text{font:11px ui-monospace,monospace;fill:currentColor}
"""


def page_of(run: Run) -> str:
    """The page. All text in it is escaped; token facts are titles shown by pointing at them."""
    body = [
        f"<h1>{_text(run.trace.question)}</h1>",
        f"<p>{_text(_about(run))}</p>",
        "<h2>Answer</h2>",
        f'<div class="text">{_text(str(run.result["answer"]))}</div>',
        *_comparison(run),
        "<h2>Time</h2>",
        *_waterfall(run),
        "<h2>Prompt</h2>",
        *_legend(run),
        *_prompt(run),
        "<h2>Layers</h2>",
        _layers(run),
    ]
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n"
        "<meta http-equiv=Content-Security-Policy content=\"default-src 'none'; "
        "style-src 'unsafe-inline'\">\n"
        "<meta name=viewport content='width=device-width'>\n"
        f"<title>{_text(run.trace.id)}</title>\n<style>{STYLE}{_colours()}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(visible(text))


def _about(run: Run) -> str:
    result = run.result
    done, cached = result["recomputed"], int(run.cached.sum())
    return (
        f"{result['model']['name']}, {result['model']['dtype']} on {result['model']['device']}; "
        f"{run.way}; {done['tokens']:,} of {cached:,} cached tokens recomputed "
        f"({100 * done['fraction']:.1f}%), {run.count:,} tokens in all; first token after "
        f"{ms(result['timing']['ttft_s'])}"
    )


def _colours() -> str:
    """Rules for the steps of the scale, statuses and parts, light and dark."""

    def rules(look: Look) -> str:
        found = []
        for step in range(1, STEPS + 1):
            style = style_of(f"h{step}", look)
            if style.color is not None and style.bgcolor is not None:
                found.append(
                    f".h{step}{{color:{style.color.name};background:{style.bgcolor.name}}}"
                )
        for name in (*PARTS, "exact", "hit", "miss", "computed", "kept", "full"):
            style = style_of(name, look)
            if style.color is not None:
                colour = style.color.name
                found.append(f".{name}{{border-color:{colour};fill:{colour};color:{colour}}}")
        return "".join(found)

    dark = "body{background:#14161b;color:#d9dce3}"
    return (
        rules(Look(dark=False))
        + f"@media(prefers-color-scheme:dark){{{dark}{rules(Look(dark=True))}}}"
        + ".text{color:inherit}"
    )


def _comparison(run: Run) -> list[str]:
    compare = run.result.get("compare")
    if not compare:
        return []
    at = first_difference(run.trace.answer, run.trace.reference)
    said = "the same answer" if at is None else f"they part at token {at}"
    return [
        f"<h2>Full prefill's answer</h2><p>{ms(compare['ttft_s'])}, {compare['speedup']:.2f}x; "
        f"{said if run.trace.reference else ''}; mean KL {compare['kl_mean']:.4f} nats, top-1 "
        f"{100 * compare['top1_agreement']:.0f}%</p>",
        f'<div class="text">{_text(str(compare["answer"]))}</div>',
    ]


def _waterfall(run: Run) -> list[str]:
    sums = totals(run)
    keys = "".join(
        f'<span class="{part}">■</span> {WORDS[part]} {ms(sums[part])} &nbsp; ' for part in PARTS
    )
    rows = "".join(
        f"<tr><td>{_text(way.name)}</td><td class=n>{ms(way.seconds)}</td>"
        f"<td class=d>{_text(way.note)}</td></tr>"
        for way in ways(run)
    )
    found = [f"<table>{rows}</table>", f"<p>{keys}</p>"]
    spans = run.trace.spans
    if not spans:
        return found
    start, end = extent(run)
    wide, high = 1000.0, 9
    shapes = []
    for number, layer in enumerate(spans):
        top = number * (high + 2)
        shapes.append(f'<text x="0" y="{top + high}">{number}</text>')
        for piece in pieces(layer):
            left = 30 + (piece.start - start) / (end - start) * (wide - 40)
            size = max(0.4, (piece.end - piece.start) / (end - start) * (wide - 40))
            tall = 3 if piece.part == "load" else high
            shapes.append(
                f'<rect class="{piece.part}" x="{left:.2f}" y="{top + high - tall}" '
                f'width="{size:.2f}" height="{tall}"><title>layer {number}: {WORDS[piece.part]} '
                f"{ms(piece.end - piece.start)} at {ms(piece.start)}</title></rect>"
            )
    height = len(spans) * (high + 2)
    found.append(
        f'<svg viewBox="0 0 {wide:.0f} {height + 16}" role=img aria-label="time of each layer">'
        + "".join(shapes)
        + f'<text x="30" y="{height + 13}">{start * 1000:.0f} ms</text>'
        + f'<text x="{wide - 10:.0f}" y="{height + 13}" text-anchor="end">{end * 1000:.0f} ms'
        + "</text></svg>"
    )
    return found


def _legend(run: Run) -> list[str]:
    if not run.measures:
        return []
    heat = heat_of(run.measures[0].values)
    boxes = "".join(f'<span class="h{step}">&nbsp;&nbsp;</span>' for step in range(1, STEPS + 1))
    return [
        f"<p>{_text(run.measures[0].title)}: {number_text(heat.low)} {boxes} "
        f"{number_text(heat.high)} (log); <span class=s>recomputed</span></p>"
    ]


def _prompt(run: Run) -> list[str]:
    values = run.measures[0].values if run.measures else np.full(run.count, np.nan, np.float32)
    steps = heat_of(values).steps
    rows = token_rows(run)
    found = []
    for segment in run.segments:
        name = f"{segment.number} {segment.name}" if segment.number else segment.name
        if segment.kind != "separator":
            found.append(
                f'<div class="d">{_text(name)} · {segment.status}, {segment.tokens:,} tokens</div>'
            )
        parts = []
        for token in range(segment.start, segment.end):
            classes = [f"h{steps[token]}"] if steps[token] else []
            if run.selected[token]:
                classes.append("s")
            text = _text(rows[token]["text"])
            if not classes:
                parts.append(text)
                continue
            value = float(values[token])
            facts = f"{token}: id {rows[token]['id']}"
            if not np.isnan(value):
                facts += f", {number_text(value)}"
            parts.append(f'<span class="{" ".join(classes)}" title="{escape(facts)}">{text}</span>')
        found.append(f'<div class="text {segment.status}">{"".join(parts)}</div>')
    return found


def _layers(run: Run) -> str:
    rows = []
    for facts in layer_facts(run):
        cells = [str(facts.layer), f"{facts.computed:,}"]
        cells += [
            "" if value is None else number_text(value)
            for value in (facts.k, facts.v, facts.attention, facts.spearman, facts.jaccard)
        ]
        rows.append("".join(f"<td class=n>{cell}</td>" for cell in cells))
    heads = ["layer", "cached tokens computed", "mean deviation K", "V", "attention"]
    heads += ["Spearman", "Jaccard"]
    head = "".join(f"<th class=n>{safe(name)}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def pages(runs: Sequence[Run]) -> str:
    """Several runs: the first alone where there is one, else all, one under the other."""
    found = [page_of(run) for run in runs]
    if len(found) == 1:
        return found[0]
    head, _, _ = found[0].partition("<body>\n")
    bodies = [page.partition("<body>\n")[2].removesuffix("\n</body></html>\n") for page in found]
    return head + "<body>\n" + "\n<hr>\n".join(bodies) + "\n</body></html>\n"
