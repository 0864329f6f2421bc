"""Numbers shown are the trace's: a small run, and what it must give, worked out by hand.

Eight tokens in two layers: a beginning (0), a stored chunk (1-4), another (5-6), the question (7).
The scores of 1-6 are 1, 8, 2, 4, 8, 0.5; three stay: 2 and 5 with 8, then 4 with 4.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from cbcli.inspect.facts import by_layer, facts, layers_text
from cbcli.inspect.html import page_of, pages
from cbcli.inspect.layermap import EACH, layer_facts, layer_map, map_lines, overlap_of, sources
from cbcli.inspect.lines import text_of
from cbcli.inspect.reuse import known_runs
from cbcli.inspect.run import Run
from cbcli.inspect.summary import pair_lines, summary_lines
from cbcli.inspect.tables import as_json, csv_text, json_text, rows_of
from cbcli.inspect.theme import Look
from cbcli.inspect.versus import differing, first_difference, kl_lines, selected
from cbcli.inspect.waterfall import drawn, extent, pieces, waterfall_lines, ways
from cbcli.traces import traces_root
from engine.trace import keep, kept
from engine.trace.file import is_of_mode
from engine.trace.record import AnswerToken, Deviations, LayerSpan, Stage, TokenTable, Trace
from tests.cbcli.inspect.support import example, result, segment

WORDS = [b"<s>", b"The", b" tide", b" turns", b" twice", b" Orla", b" signs", b"Who?"]


def by_hand(order: str = "ab", **more: object) -> Trace:
    """The run above; order "ba": with its chunks the other way round, and the same scores by
    position."""
    parts = [segment("prefix", 0, 1, "exact")]
    sizes = {"a": 4, "b": 2}
    at = 1
    for name in order:
        end = at + sizes[name]
        source = f"docs/{name}.md"
        parts.append(segment("chunk", at, end, "hit", chunk_id=name * 64, source=source))
        at = end
    parts.append(segment("suffix", 7, 8, "computed"))
    done = result(parts, 8, chosen=3, ratios=[0.5])
    done["timing"] = done["timing"] | {"ttft_s": 0.010}
    done["compare"] = {
        "ttft_s": 0.040,
        "speedup": 4.0,
        "kl_first": 0.25,
        "kl_mean": 0.125,
        "top1_agreement": 0.5,
        "first_divergence": 1,
        "answer": "a c",
    }
    scored = np.arange(1, 7, dtype=np.int32)
    scores = np.array([1, 8, 2, 4, 8, 0.5], dtype=np.float32)
    v = np.array([[1, 8, 2, 4, 8, 0.5], [2, 9, 1, 3, 4, 0.25]], dtype=np.float32)
    trace = Trace(
        id="by-hand",
        created=0.0,
        level="full",
        question="Who?",
        result=done,
        layers=2,
        tokens=TokenTable(
            np.arange(100, 108, dtype=np.int32),
            b"".join(WORDS),
            np.cumsum([len(word) for word in WORDS]).astype(np.int32),
            np.array([0, 1, 2, 1, 2, 2, 1, 2], dtype=np.int16),
        ),
        stages=(Stage(1, scored, scores, 3),),
        spans=(
            LayerSpan(0.0, 0.0, 0.002, 0.002, 0.0, 0.0, 0.003),
            LayerSpan(0.005, 0.002, 0.004, 0.0, 0.001, 0.001, 0.002),
        ),
        phases=(),
        answer=(AnswerToken(1, "a"), AnswerToken(2, " b")),
        reference=(AnswerToken(1, "a", 0.25), AnswerToken(3, " c", 0.0)),
        deviations=Deviations((0, 1), scored, v * 2, v),
        bound=0.2,
        reuse_ttft_s=0.005,
    )
    return replace(trace, **more)


@pytest.fixture
def run() -> Run:
    return Run(by_hand())


def fact(run: Run, token: int) -> dict[str, str]:
    shown = [text_of(one) for one in facts(run, token, 60)]
    return {"text": shown[0]} | {text[:12].strip(): text[12:].strip() for text in shown[1:]}


def test_what_is_said_of_a_token(run: Run) -> None:
    said = fact(run, 4)
    assert said == {
        "text": "' twice'",
        "id": "104",
        "position": "4 of 8",
        "bytes": "17-23 (6)",
        "part of": "1 a.md",
        "at": "3 of its 4",
        "chunk": "aaaaaaaaaaaa",
        "source": "docs/a.md",
        "state": "cached, recomputed",
        "computed in": "all (0-1)",
        "layer 1": "4",
        "rank": "3 of 6, chosen",
        "dev. K": "7 (mean)",
        "dev. V": "3.5 (mean)",
    }
    assert fact(run, 3) | {"text": ""} == fact(run, 3) | {
        "text": "",
        "rank": "4 of 6, not chosen",
    }
    assert fact(run, 3)["state"] == "cached, as stored"
    assert fact(run, 0)["layer 1"] == "not scored"
    assert fact(run, 7)["state"] == "computed"


def test_equal_scores_rank_the_first_token_first(run: Run) -> None:
    assert run.ranks[0].tolist() == [0, 5, 1, 4, 3, 2, 6, 0]
    assert run.trace.selected.tolist() == [2, 4, 5]


def test_layers_in_words() -> None:
    assert [layers_text(n, 3) for n in range(4)] == ["none", "0 of 0-2", "0-1 of 0-2", "all (0-2)"]


def test_by_layer_the_highest_fills_its_cell(run: Run) -> None:
    shown = [text_of(one) for one in by_layer(run, 2, 30)]
    assert shown[:4] == ["", "deviation of V, by layer", "██", "layers 0-1, most 9 at 1"]
    assert by_layer(run, 0, 30) == []


def test_a_map_keeps_the_peaks(run: Run) -> None:
    v, k, computed = sources(run)
    assert [v.title, k.title, computed.title] == [
        "deviation of V",
        "deviation of K",
        "share computed",
    ]
    small = layer_map(v, 4, 2)
    assert small.column_edges == (0, 2, 4, 6, 8)
    assert small.peak(0, 1) == (0, 2, 8.0)
    assert small.peak(1, 1) == (1, 2, 9.0)
    assert np.isnan(small.peak(0, 0)[2]) == np.False_
    assert small.peak(1, 3) == (1, 6, 0.25)
    assert small.heat.high == 9.0
    assert small.heat.steps[1, 1] == 7
    one = layer_map(v, 1, 1)
    assert one.peak(0, 0) == (1, 2, 9.0)
    each = layer_map(v, 8, 2, EACH).heat.steps
    assert each.max(axis=1).tolist() == [7, 7]  # each layer's own highest
    assert layer_map(computed, 8, 2).source.values.sum() == 7 + 4


@pytest.mark.parametrize("look", [Look(), Look(color=False), Look(ascii=True)])
def test_maps_of_any_look_have_a_cell_a_column(run: Run, look: Look) -> None:
    small = layer_map(sources(run)[0], 8, 2)
    shown = [text_of(one) for one in map_lines(small, look, False, (1, 2))]
    assert [len(text) for text in shown] == [12, 12]
    assert shown[1].startswith("  1>")
    assert not look.ascii or all(text.isascii() for text in shown)


def test_figures_of_layers(run: Run) -> None:
    first, second = layer_facts(run)
    assert (first.computed, second.computed) == (6, 3)
    assert first.v == pytest.approx((1 + 8 + 2 + 4 + 8 + 0.5) / 6)
    assert second.k == pytest.approx(2 * (2 + 9 + 1 + 3 + 4 + 0.25) / 6)
    beside = overlap_of(run)
    assert beside is not None
    assert (beside.layer, beside.part, beside.count) == (1, "v", 3)
    # Layer 0's first three are 2, 5, 4; layer 1's are 2, 5, 4: the same. Ranks of layer 0 are
    # 2, 5.5, 3, 4, 5.5, 1, of layer 1 3, 6, 2, 4, 5, 1.
    assert first.jaccard == 1.0
    ranks = np.corrcoef([2, 5.5, 3, 4, 5.5, 1], [3, 6, 2, 4, 5, 1])[0, 1]
    assert first.spearman == pytest.approx(ranks)
    assert second.spearman == pytest.approx(1.0)


def test_the_parts_of_a_layer_follow_one_another(run: Run) -> None:
    parts = [(p.part, round(p.start, 6), round(p.end, 6)) for p in pieces(run.trace.spans[1])]
    assert parts == [
        ("load", 0.002, 0.006),
        ("rotate", 0.005, 0.006),
        ("score", 0.006, 0.007),
        ("recompute", 0.007, 0.009),
    ]
    assert extent(run) == (0.0, 0.010)
    cells = drawn(pieces(run.trace.spans[1]), 0.0, 0.010, 10)
    assert cells == [*["", ""], *["load"] * 3, "rotate", "score", *["recompute"] * 2, ""]


def test_a_question_that_read_first_did_so_at_its_time() -> None:
    layer = LayerSpan(0.5, 0.0, 0.1, 0.1, 0.2, 0.1, 0.3, read_start_s=0.05)
    parts = [(p.part, round(p.start, 6)) for p in pieces(layer)]
    assert parts == [
        ("load", 0.0),
        ("stall", 0.05),
        ("rotate", 0.15),
        ("score", 0.35),
        ("recompute", 0.5),
    ]


def test_numbers_beside_the_waterfall(run: Run) -> None:
    last = text_of(waterfall_lines(run, Look(), 120)[2]).split()
    assert [float(number) for number in last[-4:]] == [4.0, 1.0, 1.0, 2.0]
    narrow = text_of(waterfall_lines(run, Look(), 80)[1])
    assert narrow.split()[-1] == "5.0"  # waiting and computing


def test_ways_are_beside_each_other(run: Run) -> None:
    found = {way.name: way.seconds for way in ways(run)}
    assert found == {
        "blend value 0.5": 0.010,
        "full prefill": 0.040,
        "reuse": 0.005,
        "bound": pytest.approx(0.008),
    }
    assert ways(run)[3].note == "80% of it reached"


def test_answers_part_where_they_differ(run: Run) -> None:
    mine, full = run.trace.answer, run.trace.reference
    assert first_difference(mine, full) == 1
    assert first_difference(mine, mine) is None
    assert first_difference(mine, mine[:1]) == 1
    assert differing(mine, full) == ([False, True], [False, True])
    shown = [text_of(one).split() for one in kl_lines(run, None, Look(ascii=True), 60)]
    assert shown[0][:3] == ["0", "a", "0.2500"]
    assert shown[1] == ["1", "c", "0.0000"]
    more = replace(run.trace, reference=(*run.trace.reference, AnswerToken(4, " d")))
    assert len(kl_lines(Run(more), None, Look(), 60)) == 2  # of the last it isn't known


def test_selections_are_compared_by_chunk_whatever_the_order(run: Run) -> None:
    other = Run(by_hand("ba"))
    found = selected(run, other)
    # In order ba, positions 1-2 are b's and 3-6 a's; 2, 4, 5 stay: b's 1, a's 1 and 2.
    a, b = "a" * 64, "b" * 64
    assert found.both == ((a, 0, 1),)
    assert found.one == ((a, 0, 3), (b, 0, 0))
    assert found.other == ((a, 0, 2), (b, 0, 1))
    assert found.common == 6
    same = selected(run, run)
    assert (len(same.both), same.one, same.other) == (3, (), ())


def test_exports_have_the_same_numbers(run: Run) -> None:
    done = as_json(run)
    assert json.loads(json_text([run])) == done
    assert done["stages"][0]["scores"] == [1, 8, 2, 4, 8, 0.5]
    assert done["stages"][0]["selected"] == [2, 4, 5]
    assert done["per_layer"][1]["cached_tokens_computed"] == 3
    assert done["overlap"] == {"check_layer": 1, "part": "v", "top": 3}
    assert done["spans"][1]["recompute_s"] == 0.002
    rows = list(csv.DictReader(io.StringIO(csv_text(rows_of("tokens", run)))))
    assert [row["text"] for row in rows] == [word.decode() for word in WORDS]
    scores = [row["score at layer 1"] for row in rows]
    assert scores == ["", "1.0", "8.0", "2.0", "4.0", "8.0", "0.5", ""]
    assert [row["selected"] for row in rows] == [str(n in (2, 4, 5)) for n in range(8)]
    assert [row["kl"] for row in rows_of("compare", run)] == [0.25, 0.0]
    assert len(json.loads(json_text([run, run]))) == 2
    for view in ("layers", "time", "compare"):
        assert len(rows_of(view, run)) == 2


def test_texts_have_them_too(run: Run) -> None:
    shown = [text_of(one) for one in summary_lines(run)]
    assert any("3 of 6 cached tokens recomputed (50.0%), 8 tokens in all" in text for text in shown)
    top = next(n for n, text in enumerate(shown) if "highest score at layer 1" in text)
    assert [text.split()[0] for text in shown[top + 1 : top + 5]] == ["2", "5", "4", "3"]
    pair = "\n".join(text_of(one) for one in pair_lines(run, Run(by_hand("ba"))))
    assert "1 in both, 2 in A alone, 2 in B alone; 20% of those in either" in pair
    rows = [line.split() for line in pair.splitlines()]
    assert ["a.md", "1", "1", "1"] in rows
    assert ["b.md", "0", "1", "1"] in rows


def test_pages_escape_everything_and_need_nothing() -> None:
    hostile = "<script>alert(1)</script>\x1b[2J&\"'"
    trace = by_hand()
    words = [*WORDS[:2], hostile.encode(), *WORDS[3:]]
    tokens = replace(
        trace.tokens,
        text=b"".join(words),
        ends=np.cumsum([len(word) for word in words]).astype(np.int32),
    )
    done = dict(trace.result, answer=hostile, policy=hostile)
    done["compare"] = dict(done["compare"], answer=hostile)
    done["prompt"]["segments"][1]["source"] = hostile
    page = page_of(Run(replace(trace, tokens=tokens, question=hostile, id=hostile, result=done)))
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('class="h7 s"') == 2  # the two highest, both recomputed
    assert 'title="4: id 104, 4"' in page
    assert pages([Run(trace), Run(trace)]).count("<h2>Prompt</h2>") == 2


def test_runs_without_anything_recorded_are_shown_all_the_same() -> None:
    bare = Run(
        replace(
            example(deviations=False, attention=False, compare=False),
            stages=(),
            spans=(),
            phases=(),
            bound=None,
            reuse_ttft_s=None,
        )
    )
    assert bare.measures == ()
    assert overlap_of(bare) is None
    assert [way.name for way in ways(bare)] == ["blend value 0.16"]
    assert "no layer was timed" in text_of(waterfall_lines(bare, Look(), 80)[0])
    assert "no token was scored" in "\n".join(text_of(one) for one in summary_lines(bare))
    assert page_of(bare)
    assert as_json(bare)["overlap"] is None


def test_exact_chunks_do_not_count_in_what_layers_have_in_common() -> None:
    """Of what is exact nothing deviates in any layer: all of it alike would look like agreement."""
    trace = by_hand()
    done = dict(trace.result)
    done["prompt"] = dict(done["prompt"])
    done["prompt"]["segments"] = [
        dict(part, status="exact") if part["chunk_id"] == "b" * 64 else part
        for part in done["prompt"]["segments"]
    ]
    beside = overlap_of(Run(replace(trace, result=done)))
    assert beside is not None
    assert beside.count == 2  # of the four that were no others', of which two were recomputed
    found = layer_facts(Run(replace(trace, result=done)))
    assert found[0].spearman == pytest.approx(0.8)  # of 2 9 1 3 and 1 8 2 4
    for part in done["prompt"]["segments"]:
        part["status"] = "exact"
    assert overlap_of(Run(replace(trace, result=done))) is None


def test_reuse_of_the_same_prompt_is_found_among_runs_and_kept_ones() -> None:
    blend = replace(example(), reuse_ttft_s=None)
    quick = dict(blend.result, mode="reuse", timing=dict(blend.result["timing"], ttft_s=0.004))
    reuse = replace(blend, id="20260101T120000.000000-0001", result=quick, reuse_ttft_s=0.004)
    elsewhere = replace(
        reuse, result=dict(quick, model=dict(quick["model"], device="cuda"), prompt=quick["prompt"])
    )
    assert Run(blend).reuse_s is None
    assert Run(blend, lambda: [blend, elsewhere]).reuse_s is None
    assert Run(blend, lambda: [blend, elsewhere, reuse]).reuse_s == 0.004
    told = [(way.name, way.seconds) for way in ways(Run(blend, lambda: [reuse]))]
    assert ("reuse", 0.004) in told
    assert [way.name for way in ways(Run(reuse))].count("reuse") == 1

    folder = traces_root()
    keep(reuse, folder, 9)
    keep(replace(blend, id="20260101T120001.000000-0002", question='"mode":"reuse"'), folder, 9)
    (folder / "20260101T120002.000000-0003.cbtrace").write_bytes(b"CBTRACE\nnot whole")
    assert [is_of_mode(path, "reuse") for path in kept(folder)] == [False, False, True]
    assert Run(blend, lambda: known_runs([blend])).reuse_s == 0.004
