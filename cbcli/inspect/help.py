"""`?`: what the view shows, and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

NAMES = {
    "slash": "/",
    "question_mark": "?",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "pagedown": "PgDn",
    "pageup": "PgUp",
    "escape": "Esc",
    "upper_n": "N",
    "upper_f": "F",
    "upper_r": "R",
    "ctrl+p": "^p",
    "ctrl+c": "^c",
    "ctrl+q": "^q",
}


def key_name(binding: Binding) -> str:
    """The keys of a binding as people know them."""
    shown = binding.key_display or binding.key
    return " ".join(NAMES.get(key, key) for key in shown.split(","))


def help_text(title: str, about: str, groups: Sequence[tuple[str, Sequence[Binding]]]) -> Text:
    """What is shown: the view in words, then every key with what it does."""
    text = Text()
    text.append(title + "\n\n", "bold")
    text.append(about + "\n")
    for name, bindings in groups:
        text.append(f"\n{name}\n", "bold")
        by_action: dict[str, tuple[list[str], Binding]] = {}
        for binding in bindings:
            keys, _ = by_action.setdefault(binding.action, ([], binding))
            keys.append(key_name(binding))
        for keys, binding in by_action.values():
            said = binding.tooltip or binding.description
            text.append(f"  {' '.join(keys):<12} ", "bold")
            text.append(said + "\n")
    return text


class HelpScreen(ModalScreen[None]):
    """The help over the view it is about."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss(None)", "Close", id="help.close"),
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll { width: 80%; min-width: 60; max-width: 96; height: auto;
        max-height: 90%; background: $surface; border: round $primary; padding: 0 2; }
    HelpScreen.-ascii VerticalScroll { border: ascii $primary; scrollbar-size: 0 0; }
    HelpScreen Static { width: 100%; height: auto; }
    """

    def __init__(self, text: Text, *, ascii: bool = False) -> None:
        super().__init__()
        self.text = text
        self.set_class(ascii, "-ascii")

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_subtitle = "Esc closes"
            yield Static(self.text)
