"""Asking anew from the view, with a runner made up; nothing waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from cache_store.errors import NotFoundError
from cbcli.commands.inspect import asked
from cbcli.inspect.app import InspectApp
from cbcli.inspect.chunks import ChunkList
from cbcli.inspect.engine_runner import EngineRunner
from cbcli.inspect.knobs import KnobList
from cbcli.inspect.lines import text_of
from cbcli.inspect.run import Run
from cbcli.inspect.runner import StoredChunk, Wish
from cbcli.inspect.session import Session
from cbcli.inspect.theme import Look
from cbcli.inspect.tokens import TokenPage
from cbcli.inspect.wishes import matching, moved, toggled, turned, wish_as_set, wish_of
from cbcli.settings import load_settings
from engine.trace.record import Trace
from tests.cbcli.inspect.support import example
from tests.cbcli.inspect.test_app import play, press, screen_text
from tests.cbcli.inspect.test_numbers import by_hand
from tests.cbcli.world import make_world

STORED = [
    StoredChunk("a" * 64, "docs/a.md", 0, 4, 92_000, 3, "The tide turns twice"),
    StoredChunk("b" * 64, "docs/b.md", 0, 2, 46_000, 0, "Orla signs [/bold]\x1b[2J"),
    StoredChunk("c" * 64, "docs/[red].md", 1, 9, 207_000, 1, "Ropes are hung"),
]


class Made:
    """A runner that waits until it is let go, and gives runs by hand."""

    def __init__(self, *, wait: bool = False, error: Exception | None = None) -> None:
        self.wishes: list[Wish] = []
        self.go, self.error = threading.Event(), error
        self.threads: set[str] = set()
        if not wait:
            self.go.set()

    def chunks(self) -> Sequence[StoredChunk]:
        self.threads.add(threading.current_thread().name)
        return STORED

    def run(self, wish: Wish, say: Callable[[str], None]) -> Trace:
        self.threads.add(threading.current_thread().name)
        self.wishes.append(wish)
        say("prefilling")
        if not self.go.wait(10):
            raise TimeoutError
        say("answering, 1 tokens")
        if self.error is not None:
            raise self.error
        return example(name=f"made-{len(self.wishes)}", ratio=wish.ratio)


def status(app: InspectApp) -> str:
    return str(app.query_one("#status", Static).content)


async def until(pilot: Pilot[None], what: Callable[[], object]) -> None:
    for _ in range(100):
        if what():
            await pilot.pause()
            return
        await pilot.pause(0.05)
    raise AssertionError("it never came")


def test_knobs_turn_within_their_ends() -> None:
    wish = Wish("Who?", ("a", "b", "c"), ratio=0.98)
    assert turned(wish, "ratio", 10).ratio == 1.0
    assert turned(wish, "ratio", -1).ratio == 0.97
    assert turned(replace(wish, ratio=0.05), "ratio", -10).ratio == 0.0
    assert turned(wish, "check layer", -5).check_layer == 1
    assert turned(wish, "policy", -1).policy == "random"
    assert turned(turned(wish, "context", 1), "context", 1).context == "none"
    assert not turned(wish, "compare", 1).compare
    assert turned(wish, "question", 1) == wish
    assert moved(wish, 0, 1).chunks == ("b", "a", "c")
    assert moved(wish, 0, -1) == wish
    assert moved(wish, 2, 1) == wish
    assert toggled(toggled(wish, "b"), "b").chunks == ("a", "c", "b")


def test_a_run_gives_the_wish_that_made_it() -> None:
    assert wish_of(Run(by_hand())) == Wish("Who?", ("a" * 64, "b" * 64), 0.5, "value", 1)


def test_chunks_are_found_by_text_document_and_id() -> None:
    assert [c.chunk_id[0] for c in matching(STORED, "ORLA")] == ["b"]
    assert [c.chunk_id[0] for c in matching(STORED, "[red]")] == ["c"]
    assert [c.chunk_id[0] for c in matching(STORED, "aaaa")] == ["a"]
    assert len(matching(STORED, "")) == 3


def test_a_question_is_told_from_a_file() -> None:
    assert asked(["run.cbtrace"], [], None) is None
    assert asked(["Who signs off?"], [], None) == Wish("Who signs off?")
    assert asked(["Who?"], ["3f9a", "77b0"], None) == Wish("Who?", ("3f9a", "77b0"))


def test_knobs_are_turned_and_run() -> None:
    made = Made()

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "5")
        await until(pilot, lambda: app.stored)
        await press(pilot, "right", "right", "down", "left", "down", "right")
        await press(pilot, "down", "right", "down", "enter")
        app.query_one("#question", Input).value = "  Why? "
        await press(pilot, "enter")
        await press(pilot, "down", "J", "up", "d", "g")
        await until(pilot, lambda: len(app.runs) == 2)
        wish = made.wishes[0]
        assert wish == Wish("Why?", ("a" * 64,), 0.52, "question", 2, "bos", True)
        assert app.current == 1
        assert "run 2 done" in status(app)
        assert "blend value 0.52" in screen_text(app)
        await press(pilot, "g")
        await until(pilot, lambda: len(app.runs) == 3)
        await press(pilot, "1")
        assert app.query_one(TokenPage).run is app.runs[2]
        await press(pilot, "r")
        assert app.shown_run.trace.id == "by-hand"

    play(script, by_hand(), session=Session(lambda: made))
    assert made.threads == {"runner_0"}


def test_a_run_is_cancelled_at_once_and_the_view_goes_on() -> None:
    made = Made(wait=True)

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "5", "g")
        await until(pilot, lambda: "prefilling" in status(app))
        await press(pilot, "1", "n", "5")  # nothing waits
        await press(pilot, "x")
        assert status(app) == "cancelled"
        made.go.set()
        await press(pilot, "g")
        await until(pilot, lambda: len(app.runs) == 2)
        assert len(made.wishes) == 2  # the first one's end was thrown away

    play(script, by_hand(), session=Session(lambda: made))


@pytest.mark.parametrize("error", [NotFoundError("no such chunk [/]", "see ls"), ValueError("x")])
def test_a_run_that_fails_says_so(error: Exception) -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "5", "g")
        await until(pilot, lambda: "failed" in status(app))
        assert len(app.runs) == 1
        assert not app.running

    play(script, by_hand(), session=Session(lambda: Made(error=error)))


def test_a_question_is_asked_first_then_shown() -> None:
    made = Made()

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await until(pilot, lambda: app.runs)
        assert made.wishes == [Wish("Who?", ("a" * 64,))]
        assert app.shown == "knobs"
        for number in "123456":
            await press(pilot, number)
            assert app.query_one("TabBar") is not None
        assert app.shown == "chunks"

    wish = Wish("Who?", ("a" * 64,))
    play(script, traces=[], session=Session(lambda: made), wish=wish)


def test_the_engine_runs_a_question_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(tmp_path, monkeypatch)
    assert world("ingest", "docs").exit_code == 0
    chunks = [chunk["chunk_id"] for chunk in world.chunks()][:2]
    picked = ["--chunk", chunks[1][:8], "--chunk", chunks[0][:8]]
    done = world.json("inspect", "When does the tide turn?", *picked)
    assert done["question"] == "When does the tide turn?"
    used = [part["chunk_id"] for part in done["result"]["prompt"]["segments"]]
    assert [chunk for chunk in used if chunk] == [chunks[1], chunks[0]]
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CACHEBLEND_MODEL", "tiny")
    monkeypatch.setenv("CACHEBLEND_MIN_TOKENS", "0")
    monkeypatch.setenv("CACHEBLEND_MAX_TOKENS", "5")
    runner, said = EngineRunner({}), list[str]()
    monkeypatch.setenv("CACHEBLEND_RATIO", "0.3")
    monkeypatch.setenv("CACHEBLEND_CONTEXT", "bos")
    set_so = wish_as_set("Why?", ["a"], load_settings({"policy": "value"}))
    assert set_so == Wish("Why?", ("a",), 0.3, "value", 1, "bos")
    monkeypatch.delenv("CACHEBLEND_CONTEXT")
    stored = runner.chunks()
    assert {chunk.chunk_id for chunk in stored} >= set(chunks)
    assert all(chunk.size > 0 for chunk in stored)
    wish = Wish("Who keeps the log?", tuple(chunks), ratio=0.5, policy="value")
    first = runner.run(wish, said.append)
    assert (first.result["policy"], *first.result["ratios"]) == ("value", 0.5)
    assert first.result["compare"] is not None
    assert "loading the model" in said
    again = runner.run(Wish("Who keeps the log?", compare=False, context="none"), said.append)
    assert again.result["compare"] is None
    assert said.count("loading the model") == 2  # another context
    assert wish_of(Run(first)) == wish


def test_chunks_are_searched_read_and_picked() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "6")
        await until(pilot, lambda: app.stored)
        chunks = app.query_one(ChunkList)
        assert "The tide turns twice" in str(app.query_one("#chunk-text", Static).content)
        await press(pilot, "end", "space", "home", "space")
        assert app.wish.chunks == ("b" * 64, "c" * 64)
        await press(pilot, "down")
        shown = str(app.query_one("#chunk-text", Static).content)
        assert "Orla signs [/bold]␛[2J" in shown
        await press(pilot, "slash")
        app.query_one("#chunk-search", Input).value = "ropes"
        await press(pilot, "enter")
        assert [chunk.chunk_id[0] for chunk in chunks.found] == ["c"]
        await press(pilot, "escape")
        assert len(chunks.found) == 3
        assert "2" in text_of(chunks.line_at(3))[:6]

    play(script, by_hand(), session=Session(Made))


def test_chunks_are_sorted_and_the_cursor_stays_on_its_chunk() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "6")
        await until(pilot, lambda: app.stored)
        chunks = app.query_one(ChunkList)
        seen = []
        for _ in range(4):
            await press(pilot, "o")
            seen.append("".join(chunk.chunk_id[0] for chunk in chunks.found))
            assert chunks.chunk is STORED[0]
        assert seen == ["cab", "cab", "acb", "abc"]
        await pilot.click(ChunkList, offset=(20, 0))
        assert chunks.order == "tokens"
        await press(pilot, "home")
        assert chunks.chunk is STORED[2]

    play(script, by_hand(), session=Session(Made))


def test_knobs_in_every_look_and_size() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number in "56":
            await press(pilot, number)
            await until(pilot, lambda: app.stored)
            assert not {char for char in screen_text(app) if not char.isascii()}
            await press(pilot, "question_mark", "escape")

    play(script, by_hand(), size=(80, 24), ascii=True, session=Session(Made))
    assert Look(ascii=True).rule == "-"
    assert KnobList.BINDINGS


def test_keys_that_come_all_at_once_go_to_the_view_they_are_meant_for() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for key in ("5", "down", "right"):
            app.simulate_key(key)
        await pilot.pause()
        assert (app.shown, app.token) == ("knobs", 2)
        assert app.wish.policy == "key"
        await press(pilot, "enter", "end", "4", "2")  # digits are text in a field
        assert app.query_one("#question", Input).value == "Who?42"
        await press(pilot, "escape", "1", "slash", "colon", "6", "enter")
        assert (app.shown, app.token) == ("tokens", 6)
        await press(pilot, "question_mark", "2", "escape")
        assert app.shown == "tokens"

    play(script, by_hand(), session=Session(Made))
