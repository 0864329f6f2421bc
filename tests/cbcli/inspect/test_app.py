"""Every key and view, as a person would use them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widgets import Footer, Input, Static
from textual.widgets._footer import FooterKey

from cbcli.inspect.app import InspectApp
from cbcli.inspect.compare import CompareCanvas
from cbcli.inspect.help import HelpScreen
from cbcli.inspect.layers import LayerTable, MapCanvas
from cbcli.inspect.lines import text_of
from cbcli.inspect.time import TimeCanvas
from cbcli.inspect.tokens import TokenPage
from engine.trace.record import Trace
from tests.cbcli.inspect.support import example, long, make
from tests.cbcli.inspect.test_cells import cut
from tests.cbcli.inspect.test_numbers import by_hand

Script = Callable[["Pilot[None]", InspectApp], Awaitable[None]]


def play(
    script: Script, *traces: Trace, size: tuple[int, int] = (120, 40), **options: object
) -> None:
    """Runs the app with these traces, and the script against it."""

    async def act() -> None:
        shown = options.pop("traces", traces or [example()])
        app = InspectApp(shown, **options)  # type: ignore[arg-type]
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await script(pilot, app)

    asyncio.run(act())


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


async def find(pilot: Pilot[None], app: InspectApp, text: str) -> None:
    """Searches for a text."""
    await pilot.press("slash")
    app.query_one("#search", Input).value = text
    await press(pilot, "enter")


def screen_text(app: InspectApp) -> str:
    """What stands on the screen."""
    rows = app.screen._compositor.render_strips()
    return "\n".join(strip.text for strip in rows)


def test_the_cursor_goes_by_token_line_chunk_and_recomputed_token() -> None:
    trace = example()
    chosen = trace.selected.tolist()

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        page = app.query_one(TokenPage)
        assert page.cursor == chosen[0] == app.token
        await press(pilot, "n")
        assert page.cursor == chosen[1]
        await press(pilot, "N", "N")
        assert page.cursor == chosen[-1]  # around the end
        await press(pilot, "n")
        assert page.cursor == chosen[0]
        await press(pilot, "right", "right", "left")
        assert page.cursor == chosen[0] + 1
        await press(pilot, "home")
        assert page.cursor == 0
        await press(pilot, "left")
        assert page.cursor == 0
        await press(pilot, "]", "]")
        assert page.cursor == 73  # the second chunk, past the separator
        await press(pilot, "right", "[")
        assert page.cursor == 73
        await press(pilot, "[")
        assert page.cursor == 9  # the chunk before, past the separator
        await press(pilot, "end")
        assert page.cursor == app.shown_run.count - 1
        before = page.page.row_of_token(page.cursor)  # type: ignore[union-attr]
        await press(pilot, "up")
        assert page.page.row_of_token(page.cursor) < before  # type: ignore[union-attr]
        await press(pilot, "home", "down", "down")
        assert 4 in page.page.rows_of_token(page.cursor)  # type: ignore[union-attr]

    play(script, trace)


def test_the_panel_says_what_is_known_of_the_token() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "home", "right", "right", "right", "right")
        panel = str(app.query_one("#panel", Static).content)
        assert "' twice'" in panel
        assert "3 of 6, chosen" in panel
        assert "all (0-1)" in panel

    play(script, by_hand())


def test_colours_change_with_measure_and_scale() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        page = app.query_one(TokenPage)
        assert "score at layer 1" in text_of(page.legend())
        steps = page.heat.steps.tolist()  # type: ignore[union-attr]
        await press(pilot, "m")
        assert "attention" in text_of(page.legend())
        await press(pilot, "m", "m", "m")
        assert page.heat.steps.tolist() == steps  # type: ignore[union-attr]
        await press(pilot, "l")
        assert page.scale == "linear"
        assert page.heat.steps.tolist() != steps  # type: ignore[union-attr]
        await press(pilot, "l", "l")
        assert page.scale == "log"

    play(script)


def test_searching_marks_and_goes_from_match_to_match() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        page = app.query_one(TokenPage)
        await press(pilot, "home")
        await find(pilot, app, "ORLA")
        matches = [start for start, _ in page.matches]
        assert len(matches) == 4
        assert page.cursor == matches[0]
        assert app.focused is page
        await press(pilot, "f")
        assert page.cursor == matches[1]
        await press(pilot, "F", "F")
        assert page.cursor == matches[-1]
        await find(pilot, app, ":12")
        assert page.cursor == 12
        await press(pilot, "slash", "escape")
        assert page.matches == []
        assert app.focused is page
        await find(pilot, app, "[/nothing")
        assert page.cursor == 12
        await press(pilot, "f")  # says so

    play(script)


def test_a_click_puts_the_cursor_on_the_token() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        page = app.query_one(TokenPage)
        await press(pilot, "home")
        assert await pilot.click(TokenPage, offset=(6, 1))
        await pilot.pause()
        assert page.cursor == 1

    play(script)


def test_pages_go_through_a_long_prompt() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        page = app.query_one(TokenPage)
        await press(pilot, "home", "pagedown", "pagedown", "space")
        top = page.scroll_offset.y
        assert top > 60
        row = page.page.row_of_token(page.cursor)  # type: ignore[union-attr]
        assert top <= row < top + page.size.height
        await press(pilot, "pageup")
        assert page.scroll_offset.y < top

    play(script, long(4000))


def test_views_are_shown_by_number_and_by_mouse() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number, name in enumerate(("tokens", "layers", "time", "compare"), 1):
            await press(pilot, str(number))
            assert app.shown == name
            assert app.current_view.display
            assert app.focused is not None
            assert app.focused in app.current_view.query("*")
        await pilot.click("TabBar", offset=(24, 0))
        await pilot.pause()
        assert app.shown == "layers"

    play(script)


def test_the_map_of_layers_leads_to_the_token() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "2")
        canvas = app.query_one(MapCanvas)
        assert canvas.map is not None
        assert canvas.cursor == (1, 2)  # the check layer, the token looked at
        assert "layer 1, token 2, 1 a.md: 9 at 2 ' tide'" in text_of(canvas.told())
        await press(pilot, "up", "right")
        assert "layer 0, token 3, 1 a.md: 2 at 3 ' turns'" in text_of(canvas.told())
        await press(pilot, "left", "left", "home")
        assert "nothing recorded" in text_of(canvas.told())
        await press(pilot, "end", "down")
        assert canvas.cursor == (1, 7)
        await press(pilot, "m", "m")
        assert "100% computed" in text_of(canvas.told())
        await press(pilot, "left", "left", "enter")
        assert (app.shown, app.query_one(TokenPage).cursor) == ("tokens", 5)
        await press(pilot, "2", "m", "l")
        assert canvas.scale == "linear"
        await pilot.click(MapCanvas, offset=(4 + 2, 1))
        assert canvas.cursor == (0, 2)
        table = [text_of(one).split() for one in app.query_one(LayerTable).lines]
        assert table[2][:2] == ["0", "6"]
        assert table[3][:2] == ["1", "3"]

    play(script, by_hand())


def test_the_waterfall_has_a_cursor_with_figures() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "3")
        canvas = app.query_one(TimeCanvas)
        assert text_of(canvas.told()).startswith("layer 0: load 2.8 ms at 0.0 ms")
        await press(pilot, "down")
        assert "score 6.0 ms" in text_of(canvas.told())
        await press(pilot, "end")
        assert canvas.at == 29
        await press(pilot, "pageup", "up")
        assert canvas.at == 18
        await press(pilot, "home", "space")
        assert canvas.at == 10
        await pilot.click(TimeCanvas, offset=(20, canvas.first + 3 - canvas.scroll_offset.y))
        assert canvas.at == 3

    play(script)


def test_runs_are_compared_swapped_and_chosen() -> None:
    traces = [example(name="one"), example(name="two", seed=1), example(name="three", ratio=0.5)]

    def pair(app: InspectApp) -> list[str]:
        runs = app.query_one(CompareCanvas).pair
        assert runs is not None
        return [run.trace.id for run in runs if run is not None]

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "4")
        assert pair(app) == ["one", "two"]
        await press(pilot, "b")
        assert pair(app) == ["one", "three"]
        await press(pilot, "x")
        assert pair(app) == ["three", "one"]
        await press(pilot, "r")
        assert app.shown_run.trace.id == "one"
        await press(pilot, "R", "1")
        assert app.shown_run.trace.id == "three"
        assert "blend value 0.5" in screen_text(app)

    play(script, *traces)


def test_one_run_is_compared_with_full_prefill() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "4", "b", "x")
        shown = [text_of(one) for one in app.query_one(CompareCanvas).lines]
        assert any("they part at token 1" in text for text in shown)
        assert any("full prefill" in text for text in shown)

    play(script, by_hand())


def test_pictures_and_exports_never_replace_a_file(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "s", "s")
        await press(pilot, "e", "j")
        await press(pilot, "e", "h")
        await press(pilot, "3", "e", "c")
        await press(pilot, "e", "escape")
        await press(pilot, "e", "enter")
        await app.workers.wait_for_complete()

    play(script, by_hand(), folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cacheblend-by-hand-time.csv",
        "cacheblend-by-hand-time.json",
        "cacheblend-by-hand-tokens-2.svg",
        "cacheblend-by-hand-tokens.html",
        "cacheblend-by-hand-tokens.json",
        "cacheblend-by-hand-tokens.svg",
    ]
    assert json.loads((tmp_path / "cacheblend-by-hand-tokens.json").read_text())["id"] == "by-hand"
    assert (tmp_path / "cacheblend-by-hand-tokens.svg").read_text().startswith("<svg")
    assert (tmp_path / "cacheblend-by-hand-time.csv").read_text().startswith("layer,start_s,")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "s")
        said = [notification.message for notification in app._notifications]
        assert any("No such file" in message for message in said)

    play(script, folder=tmp_path / "missing")


def test_help_is_of_the_view_and_closes() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number, word in (("1", "Underlined tokens"), ("2", "Spearman"), ("3", "the bound")):
            await press(pilot, number, "question_mark")
            assert isinstance(app.screen, HelpScreen)
            assert word in app.screen.text.plain
            assert "Save the screen as SVG" in app.screen.text.plain
            await press(pilot, "escape")
            assert not isinstance(app.screen, HelpScreen)

    play(script)


def test_every_binding_has_an_id_and_the_footer_few_keys() -> None:
    ids: set[str] = set()

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number in "1234":
            await press(pilot, number)
            keys = app.query_one(Footer).query(FooterKey)
            assert 4 <= len(keys) <= 8
            assert sum(key.region.width for key in keys) <= 80
            for key in keys:
                assert key.tooltip or key.description == "palette"
            nodes = [node for node in (app, app.current_view, app.focused) if node is not None]
            for node in nodes:
                for _, binding in node._bindings:
                    if binding.action not in ("command_palette", "help_quit", "screen.copy_text"):
                        ids.add(binding.id or "")

    play(script, size=(80, 24))
    assert "tokens.next" in ids
    assert "app.help" in ids


def test_the_palette_has_the_views() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        await press(pilot, "ctrl+p")
        assert CommandPalette.is_open(app)
        await press(pilot, "escape")
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        assert {"View: Tokens", "Light or dark", "Export", "Next run"} <= set(commands)
        commands["View: Time"].callback()
        await pilot.pause()
        assert app.shown == "time"

    play(script)


def test_light_and_dark_change_the_colours() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        dark = app.export_screenshot()
        await press(pilot, "t")
        assert not app.look.dark
        assert app.export_screenshot() != dark
        await press(pilot, "t")
        assert app.look.dark

    play(script)


def test_without_colour_nothing_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number in "1234":
            await press(pilot, number)
            for strip in app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    for colour in (style.color, style.bgcolor) if style else ():
                        assert colour is None or colour.is_default, (number, segment)

    play(script)


def test_ascii_has_nothing_else() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number in "1234":
            await press(pilot, number)
            rest = {char for char in screen_text(app) if not char.isascii()}
            assert not rest, (number, rest)
            await press(pilot, "question_mark")
            rest = {char for char in screen_text(app) if not char.isascii()}
            assert not rest, (number, rest)
            await press(pilot, "escape")

    play(script, size=(100, 40), ascii=True)


def test_another_size_lays_everything_out_again() -> None:
    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        page = app.query_one(TokenPage)
        for size in ((80, 24), (200, 60), (40, 10), (120, 40)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            assert page.page is not None
            assert page.page.width == page.scrollable_content_region.width
            row = page.page.row_of_token(page.cursor)
            assert page.scroll_offset.y <= row < page.scroll_offset.y + page.size.height
        await pilot.resize_terminal(50, 12)
        for number in "2341":
            await press(pilot, number)

    play(script)


HOSTILE = (
    "[/ [/INST] [bold]bold[/bold] \x1b[31mred\x1b]0;title\x07 \x1b]8;;http://evil\x1b\\ \0\t "
    "👩\u200d👩\u200d👧 e\u0301 العربية 東京 \u202eabc 🇳🇱 ❤\ufe0f \u200b\r\n $(reboot) :smile: "
    "@click=app.quit\n"
)


def test_hostile_text_breaks_nothing_anywhere(tmp_path: Path) -> None:
    raw = HOSTILE.encode()
    tokens = [cut(raw, list(range(0, len(raw), 5))), [b"w" * 5000], [b"?"]]
    texts = [
        ("chunk", HOSTILE, "hit", ""),
        ("chunk", "[red]name[/red]\x1b[2J", "hit", ""),
        ("suffix", "", "computed", ""),
    ]
    trace = make(texts, tokens=tokens, name="\x1b[2J[/]")
    trace.result["answer"] = HOSTILE  # type: ignore[index]
    trace.result["policy"] = "[bold]\x1b[31m"  # type: ignore[index]
    object.__setattr__(trace, "question", HOSTILE)

    async def script(pilot: Pilot[None], app: InspectApp) -> None:
        for number in "1234":
            await press(pilot, number)
            for strip in app.screen._compositor.render_strips():
                assert strip.cell_length == sum(segment.cell_length for segment in strip) == 90
            shown = screen_text(app)
            assert "\x1b" not in shown
            assert "\x07" not in shown
        await press(pilot, "1", "home", *["right"] * 8, "end", "s", "e", "h")
        await app.workers.wait_for_complete()
        await find(pilot, app, "[/INST]")
        assert app.query_one(TokenPage).matches

    play(script, trace, size=(90, 30), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
