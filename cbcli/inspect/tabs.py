"""The line of tabs on top, and the line that says which run is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rich.text import Text
from textual import events
from textual.widget import Widget

from cbcli.inspect.lines import Line, Span, fit, line, span
from cbcli.inspect.run import Run, ms
from cbcli.inspect.theme import style_of
from cbcli.inspect.view import rich_text

if TYPE_CHECKING:
    from cbcli.inspect.app import InspectApp

NAME = " inspect "


class TabBar(Widget):
    """Numbered names of the views; a click or the number shows one."""

    ALLOW_SELECT = False
    DEFAULT_CSS = "TabBar { height: 1; background: $panel; }"

    @property
    def view(self) -> InspectApp:
        return cast("InspectApp", self.app)

    def _places(self) -> list[tuple[str, str, int]]:
        """Each tab: its id, its text, and where it begins."""
        found, at = [], len(NAME)
        for number, (name, title) in enumerate(self.view.tabs, 1):
            text = f" {number} {title} "
            found.append((name, text, at))
            at += len(text)
        return found

    def render(self) -> Text:
        look = self.view.look
        text = Text(no_wrap=True, end="", overflow="crop")
        text.append(NAME, style_of("title", look))
        for name, shown, _ in self._places():
            mine = name == self.view.shown
            text.append(shown, style_of("cur" if mine else "", look))
        return text

    def on_click(self, event: events.Click) -> None:
        for name, shown, at in self._places():
            if at <= event.x < at + len(shown):
                self.view.show_view(name)


class Headline(Widget):
    """Which of the runs is shown, in one line."""

    ALLOW_SELECT = False
    DEFAULT_CSS = "Headline { height: 1; background: $surface; }"

    def render(self) -> Text:
        app = cast("InspectApp", self.app)
        shown = headline(app.shown_run, app.current, len(app.runs)) if app.runs else no_run()
        return rich_text([fit(shown, max(1, self.size.width))], app.look)


def no_run() -> Line:
    return line(span(" no run yet: Enter writes a question, g asks it", "dim"))


def headline(run: Run, number: int, count: int) -> Line:
    """A run in one line: which of several, how, how long to its first token, its question."""
    result = run.result
    done = result["recomputed"]
    parts: list[str | Span] = [Span(" ")]
    if count > 1:
        parts.append(span(f"run {number + 1}/{count}  ", "key"))
    parts.append(span(run.way, "bold"))
    if result["mode"] == "blend" and not result["skipped_blend"]:
        parts.append(span(f"  {done['tokens']:,} of {int(run.cached.sum()):,} recomputed"))
    parts.append(span(f"  {ms(result['timing']['ttft_s'])}", "good"))
    if result.get("compare"):
        parts.append(span(f" {result['compare']['speedup']:.1f}x", "good"))
    parts.append(span(f"  {run.trace.question[:400]}", "dim"))
    return line(*parts)
