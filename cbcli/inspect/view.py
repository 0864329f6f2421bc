"""What the views have in common: they are given a run and show it when they are looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from rich.text import Text
from textual.containers import Container

from cbcli.inspect.lines import Line, in_ascii
from cbcli.inspect.run import Run
from cbcli.inspect.theme import Look, style_of

if TYPE_CHECKING:
    from cbcli.inspect.app import InspectApp


class View(Container):
    """One of the tabs. `present` is called when it is looked at and the run is another than
    before, `repaint` when colours or the width class changed."""

    help_text: ClassVar[str] = ""
    DEFAULT_CSS = "View { layout: horizontal; height: 1fr; width: 1fr; }"

    @property
    def view(self) -> InspectApp:
        return cast("InspectApp", self.app)

    def present(self, run: Run) -> None:
        raise NotImplementedError

    def repaint(self) -> None:
        raise NotImplementedError

    def take_focus(self) -> None:
        """Puts the focus on what the view is about."""
        from cbcli.inspect.canvas import Canvas

        self.screen.set_focus(self.query(Canvas).first())

    def rich(self, shown: Sequence[Line]) -> Text:
        """Lines for a Static widget."""
        return rich_text(shown, self.view.look)


def rich_text(shown: Sequence[Line], look: Look) -> Text:
    """Lines as Rich has them."""
    text = Text(no_wrap=True, overflow="crop", end="")
    for number, one in enumerate(shown):
        if number:
            text.append("\n")
        for part in one:
            told = in_ascii(part.text) if look.ascii else part.text
            text.append(told, style_of(part.role, look))
    return text
