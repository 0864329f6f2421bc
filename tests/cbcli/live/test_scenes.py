"""What the live views show of a run, by itself: no terminal, no engine, no time but the given."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.cells import cell_len

from cache_store.catalog import ChunkText
from cbcli.inspect.lines import text_of
from cbcli.inspect.theme import Look
from cbcli.live.ask import AskScene, nice, way_of
from cbcli.live.ingest import IngestScene
from cbcli.live.view import Ticker, View
from engine.ingest import IngestReport
from engine.ingest_plan import DocumentPlan, IngestPlan
from engine.options import BlendOptions
from engine.timing import Stopwatch

LOOK = Look(color=False)
LAYERS = 6


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Said(View):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.closed = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self, *, keep: bool = True) -> None:
        self.closed = True


def scene_at(clock: Clock, **named: Any) -> AskScene:
    scene = AskScene(clock=clock, **named)
    scene.about(LAYERS, BlendOptions.of(mode="blend", policy="value", ratio="0.25"))
    return scene


def watch_at(clock: Clock) -> Stopwatch:
    watch = Stopwatch()
    watch.began = clock.now
    return watch


def layer(watch: Stopwatch, number: int, start: float) -> None:
    """A layer that takes a tenth of a second: loading and waiting 20 ms, placing 30, computing
    50."""
    watch.starts[number] = start
    watch.loads[number] = start, 0.02
    watch.stalls[number] = 0.02
    watch.rotate.laps[number] = 0.03
    watch.recompute.laps[number] = 0.05
    for timer, seconds in ((watch.load, 0.02), (watch.stall, 0.02), (watch.rotate, 0.03)):
        timer.add(seconds)
    watch.recompute.add(0.05)


def texts(scene: Any, columns: int = 79, rows: int | None = 23, look: Look = LOOK) -> list[str]:
    return [text_of(line).rstrip() for line in scene.lines(columns, rows, look)]


PROMPT: Any = SimpleNamespace(token_ids=range(2345))


def test_phases_before_the_prefill_are_shown_with_their_times() -> None:
    clock = Clock()
    scene = scene_at(clock)
    scene.phase("retrieve")
    clock.now += 0.5
    scene.phase("open")
    clock.now += 1.5
    title, retrieve, opened = texts(scene)
    assert title == "blend value 0.25, before the prefill: 2,000 ms"
    assert retrieve.split()[:3] == ["retrieve", "500", "ms"]
    assert opened.split()[:3] == ["open", "1,500", "ms"]
    assert opened.count("━") == 3 * retrieve.count("━")
    scene.told("downloading", "1 of 2 MB (50%)")
    assert texts(scene)[-1].strip() == "downloading: 1 of 2 MB (50%)"
    assert scene.status() == "open, downloading: 1 of 2 MB (50%): 1,500 ms"


def test_layers_appear_one_by_one_along_a_time_that_stays_for_a_while() -> None:
    clock = Clock()
    scene, watch = scene_at(clock), watch_at(clock)
    scene.prefill(PROMPT, watch, clock.now)
    layer(watch, 0, clock.now)
    watch.starts[1] = clock.now + 0.1
    clock.now += 0.11
    title, legend, scale, first, second, third, *_ = texts(scene)
    assert title == "blend value 0.25, 2,345 tokens: 1 of 6 layers, 110 ms"
    assert (
        legend == "▁ load 20.0 ms ░ wait 20.0 ms ▒ place 30.0 ms ▓ score 0.0 ms █ compute 50.0 ms"
    )
    assert first.split() == ["0", "░" * 9 + "▒" * 13 + "█" * 22, "100.0"]
    assert second.split() == ["1", ">"]
    assert third.split() == ["2"]
    watch.stalls[1], watch.rotate.laps[1] = 0.02, 0.02
    clock.now = 100.14
    again = texts(scene)
    assert (again[2], again[3]) == (scale, first)  # the time along it has not changed: 150 ms
    assert again[4].split() == ["1", ">", "░" * 9 + "▒" * 9, "40.0"]


def test_the_end_has_every_layer_and_all_of_the_time() -> None:
    clock = Clock()
    scene, watch = scene_at(clock), watch_at(clock)
    scene.prefill(PROMPT, watch, clock.now)
    for number in range(LAYERS):
        layer(watch, number, clock.now + number * 0.1)
    watch.logits = clock.now + 0.6
    clock.now += 0.65
    scene.prefilled(0.65)
    clock.now += 10
    shown = texts(scene, rows=None)
    assert shown[0] == "blend value 0.25, 2,345 tokens: first token after 650 ms"
    numbers = [line.split() for line in shown[3 : 3 + LAYERS]]
    assert [line[0] for line in numbers] == [str(number) for number in range(LAYERS)]
    assert {line[-1] for line in numbers} == {"100.0"}
    phases = {line.split("ms")[0].strip() for line in shown[4 + LAYERS :]}
    assert phases == {"layers             600", "logits            50.0"}


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 12, 23])
@pytest.mark.parametrize("columns", [20, 39, 79, 199])
def test_it_never_takes_more_lines_than_there_are(rows: int, columns: int) -> None:
    clock = Clock()
    scene, watch = scene_at(clock), watch_at(clock)
    scene.phase("retrieve")
    assert len(texts(scene, columns, rows)) <= rows
    scene.prefill(PROMPT, watch, clock.now)
    for number in range(LAYERS):
        assert len(texts(scene, columns, rows)) <= rows
        layer(watch, number, clock.now)
        clock.now += 0.1
        if rows >= 8:  # the layer being computed is in sight
            assert any(line.startswith(f"{number:>4} >") for line in texts(scene, 79, rows))


def test_where_the_question_reads_first_its_reading_is_shown_before_any_layer_is_computed() -> None:
    clock = Clock()
    scene, watch = scene_at(clock), watch_at(clock)
    scene.prefill(PROMPT, watch, clock.now)
    watch.reads[0] = clock.now
    watch.score.laps[0] = 0.04
    watch.reads[1] = clock.now + 0.04
    clock.now += 0.05
    shown = texts(scene)
    assert shown[0].endswith("1 of 6 layers read, 50.0 ms")
    assert shown[3].split() == ["0", "▓" * 52, "40.0"]
    assert shown[4].split() == ["1", ">"]
    assert "read question" in "\n".join(shown)


def test_lines_for_where_there_is_no_terminal() -> None:
    clock, view = Clock(), Said()
    scene, watch = scene_at(clock, streams=True), watch_at(clock)
    scene.view = view
    scene.phase("open")
    clock.now += 0.25
    scene.prefill(PROMPT, watch, clock.now)
    layer(watch, 0, clock.now)
    watch.starts[1] = clock.now + 0.1
    clock.now += 0.2
    assert scene.status() == "prefill, 1 of 6 layers: 200 ms"
    watch.logits = clock.now
    scene.prefilled(0.2)
    assert view.said[0] == "open: 250 ms"
    assert view.said[1] == "first token after 200 ms: layers 200 ms"
    assert not view.closed
    scene.phase("decode")
    assert view.closed  # before the answer begins


def test_a_prefill_begun_again_is_the_one_shown() -> None:
    clock = Clock()
    scene, watch = scene_at(clock), watch_at(clock)
    scene.prefill(PROMPT, watch, clock.now)
    layer(watch, 0, clock.now)
    layer(watch, 1, clock.now)
    scene.prefill(PROMPT, watch_at(clock), clock.now)
    assert "0 of 6 layers" in texts(scene)[0]


@pytest.mark.parametrize(
    ("seconds", "end"), [(0.001, 0.001), (0.11, 0.15), (0.15, 0.15), (0.9, 1), (1.2, 1.5), (70, 80)]
)
def test_the_time_grows_in_steps(seconds: float, end: float) -> None:
    assert nice(seconds) == pytest.approx(end)


def test_what_is_done_in_words() -> None:
    assert way_of(BlendOptions.of(mode="full")) == "full prefill"
    assert way_of(BlendOptions.of(mode="reuse")) == "reuse"
    assert way_of(BlendOptions.of(policy="key", threshold="0.5")) == "blend key threshold 0.5"


def test_drawing_leaves_a_core_to_others_for_all_but_a_hundredth_of_the_time() -> None:
    called: list[float] = []

    def slow() -> None:
        called.append(time.monotonic())
        until = time.thread_time() + 0.005
        while time.thread_time() < until:
            pass

    ticker = Ticker(slow, 0.001)
    ticker.start()
    while len(called) < 3:
        time.sleep(0.01)
    ticker.stop()
    assert called[2] - called[1] >= 0.5


HOSTILE = "\x1b]0;owned\x07 [bold]x[/bold] [/] \x9b2J 日本語のテキスト " + "é" * 50 + "\u202e"


def ingest_scene(clock: Clock, source: str, text: str) -> tuple[IngestScene, IngestReport]:
    chunks = tuple(ChunkText(f"id{n}", text, 0, len(text), 500) for n in range(40))
    document = DocumentPlan(source, "digest", "new", chunks)
    missing = frozenset(chunk.chunk_id for chunk in chunks)
    plan = IngestPlan((document,), (), (), (), missing, 20_000, 40_000_000, frozenset())
    report = IngestReport()
    scene = IngestScene(clock=clock)
    scene.told("reading", "1 of 1 files (100%)")
    assert "1 of 1 files" in "\n".join(texts(scene))
    scene.work(plan, report, lambda tokens: 2000 * tokens)
    scene.told("computing", "")
    scene.computing()
    return scene, report


def test_ingest_shows_how_much_is_done_how_fast_and_the_last_chunks() -> None:
    clock = Clock()
    scene, report = ingest_scene(clock, "notes/tides.md", "The tide turns\n twice a day.")
    report.computed_chunks, report.computed_tokens, report.computed_bytes = 10, 5000, 10_000_000
    report.latest = tuple(f"id{n}" for n in range(10))
    clock.now += 4
    shown = texts(scene)
    assert shown[0] == "ingest, computing  4.0 s"
    assert shown[1].split()[-3:] == ["0", "of", "1"]
    assert shown[2].split() == ["chunks", "█" * 6, "10", "of", "40"]
    assert shown[3].endswith("5,000 of 20,000, 1,250 tokens/s")
    assert shown[4] == "stored     10.0 MB of 40.0 MB, 2.5 MB/s"
    assert shown[5] == "time left  12.0 s"
    last = shown[-1].split()
    assert last[:5] == ["notes/tides.md", "10", "500", "1.0", "MB"]
    assert shown[-1].endswith("The tide turns twice a day.")
    assert len([line for line in shown if line.startswith("notes/")]) == 10
    assert len(texts(scene, rows=12)) <= 12
    assert texts(scene, rows=12)[-1] == shown[-1]  # the newest stay in sight


@pytest.mark.parametrize("columns", [30, 79, 120])
def test_documents_text_and_names_are_data_and_keep_to_their_cells(columns: int) -> None:
    clock = Clock()
    scene, report = ingest_scene(clock, "/a/long/path/" + HOSTILE + "/" + HOSTILE, HOSTILE)
    report.latest = ("id3",)
    for look in (LOOK, replace(LOOK, ascii=True)):
        shown = texts(scene, columns, look=look)
        for text in shown:
            assert text.isprintable(), repr(text)
            assert "\u202e" not in text
        row = next(line for line in shown if "…" in line and "500" in line)
        assert cell_len(row) <= max(columns, 60)
        if columns == 120:
            assert "[bold]x[/bold]" in row
            assert "日本語" in row
