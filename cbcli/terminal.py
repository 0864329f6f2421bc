"""What the streams are: a terminal or not, and with colour or without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "yellow": "33"}


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def is_set(env: Mapping[str, str], name: str) -> bool:
    """Whether a variable says yes: it is there, and neither empty nor 0 or false."""
    return env.get(name, "").lower() not in ("", "0", "false")


class Looks:
    """How the environment wants text: NO_COLOR (no colour), FORCE_COLOR and CLICOLOR_FORCE (colour
    in a pipe too), CLICOLOR=0 and TERM=dumb (none). NO_COLOR is the strongest."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.dumb = env.get("TERM") == "dumb"
        self.bright = env.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")
        self._never = bool(env.get("NO_COLOR"))
        self._always = is_set(env, "FORCE_COLOR") or is_set(env, "CLICOLOR_FORCE")
        self._off = self.dumb or env.get("CLICOLOR") == "0"

    def coloured(self, stream: TextIO) -> bool:
        """Whether what is written there has colours."""
        if self._never or self._always:
            return not self._never
        return not self._off and is_terminal(stream)

    def can_draw(self, stream: TextIO) -> bool:
        """Whether something can be drawn there again and again."""
        return is_terminal(stream) and not self.dumb

    def styled(self, stream: TextIO, text: str, style: str) -> str:
        """`text` in a style of its own; "": none."""
        if not style or not self.coloured(stream):
            return text
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"
