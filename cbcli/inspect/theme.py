"""Colours of what roles say. Scales are ordered by lightness, so that they hold for people who see
colours otherwise; what a colour says is also said by a sign, an underline or a word."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

# Viridis without its darkest end, on dark; ColorBrewer's YlGnBu on light: (background, text).
_HEAT = {
    True: ("#3a2a63", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#6ece58", "#fde725"),
    False: ("#edf8d9", "#c7e9b4", "#8fd3bd", "#41b6c4", "#1d91c0", "#225ea8", "#0c2c84"),
}
_HEAT_TEXT = {
    True: ("#f0f0f0",) * 4 + ("#0b0b0b",) * 3,
    False: ("#101010",) * 4 + ("#ffffff",) * 3,
}
# Okabe and Ito's; darker ones on light, to be read as text.
_NAMED = {
    True: {
        "exact": "#2fbf94",
        "hit": "#6cbcee",
        "miss": "#eda62d",
        "computed": "#a9a9b3",
        "kept": "#d58fb8",
        "load": "#6cbcee",
        "stall": "#e8702a",
        "rotate": "#d58fb8",
        "score": "#f0e442",
        "recompute": "#2fbf94",
        "phase": "#8f9bb3",
        "full": "#a9a9b3",
        "one": "#6cbcee",
        "other": "#eda62d",
        "both": "#2fbf94",
        "good": "#2fbf94",
        "bad": "#e8702a",
        "title": "#f2f4f8",
        "key": "#eda62d",
    },
    False: {
        "exact": "#00664a",
        "hit": "#005f97",
        "miss": "#8f5200",
        "computed": "#5c5c66",
        "kept": "#8c3f6b",
        "load": "#3d9fd6",
        "stall": "#c24f00",
        "rotate": "#b0578a",
        "score": "#a87f00",
        "recompute": "#008a64",
        "phase": "#5a6780",
        "full": "#6b6b76",
        "one": "#005f97",
        "other": "#8f5200",
        "both": "#00664a",
        "good": "#00664a",
        "bad": "#b34700",
        "title": "#101318",
        "key": "#8f5200",
    },
}
_DIM = {True: "#8a90a0", False: "#646b7a"}
_CURSOR = {True: ("#ffffff", "#c2185b"), False: ("#ffffff", "#ad1457")}
_MATCH = {True: ("#10131a", "#f5c2e7"), False: ("#10131a", "#f0b6d8")}

# A sign for each status of KV, and for each part of a layer's time.
STATUS_SIGNS = {"exact": "║", "hit": "│", "miss": "┆", "computed": "┃", "kept": "╎"}
STATUS_ASCII = {"exact": "=", "hit": "|", "miss": ":", "computed": "#", "kept": "."}
PART_SIGNS = {"load": "▁", "stall": "░", "rotate": "▒", "score": "▓", "recompute": "█"}
PART_ASCII = {"load": ".", "stall": "-", "rotate": "r", "score": "s", "recompute": "#"}


@dataclass(frozen=True)
class Look:
    """How things look: dark or light, with colours or without, ASCII alone or not."""

    dark: bool = True
    color: bool = True
    ascii: bool = False

    @property
    def status_signs(self) -> dict[str, str]:
        return STATUS_ASCII if self.ascii else STATUS_SIGNS

    @property
    def part_signs(self) -> dict[str, str]:
        return PART_ASCII if self.ascii else PART_SIGNS

    @property
    def rule(self) -> str:
        return "-" if self.ascii else "─"

    @property
    def signs_only(self) -> bool:
        """Whether scores are to be told by signs, not by colours."""
        return self.ascii or not self.color


@lru_cache(4096)
def style_of(role: str, look: Look) -> Style:
    """The style of a role: words apart by spaces, later ones over earlier ones.

    h1 … h7: steps of the heat scale as a background; f1 … f7, b1 …: as foreground and background
    alone; sel, cur, match, dim, sym, bold, and names of statuses and parts.
    """
    style = Style()
    for word in role.split():
        style += _word(word, look)
    return style


def _word(word: str, look: Look) -> Style:
    if word in ("bold", "title", "key"):
        named = _NAMED[look.dark].get(word) if look.color else None
        return Style(bold=True, color=named)
    if word == "sel":
        return Style(underline=True, bold=not look.color or None)
    if word in ("dim", "sym"):
        return Style(color=_DIM[look.dark]) if look.color else Style(dim=True)
    if word in ("cur", "match"):
        if not look.color:
            return Style(reverse=True)
        text, ground = (_CURSOR if word == "cur" else _MATCH)[look.dark]
        return Style(color=text, bgcolor=ground, bold=word == "cur")
    if word[:1] in "hfb" and word[1:].isdecimal():
        return _heat(word[0], int(word[1:]), look)
    named = _NAMED[look.dark].get(word) if look.color else None
    return Style(color=named) if named else Style()


def _heat(kind: str, step: int, look: Look) -> Style:
    if step < 1:
        return Style()
    if not look.color:
        return Style(bold=step >= 5 or None)
    ground = _HEAT[look.dark][step - 1]
    if kind == "h":
        return Style(color=_HEAT_TEXT[look.dark][step - 1], bgcolor=ground)
    return Style(color=ground) if kind == "f" else Style(bgcolor=ground)
