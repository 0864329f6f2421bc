"""Long text a screen at a time, through the user's pager, as git does it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping

DEFAULT = "less"
LESS = "FRX"  # leave where one screen is enough, show colours, leave what was shown on the screen
_NOT_THERE = (126, 127)  # what a shell returns where it cannot run a command


def pager_command(wanted: bool | str, env: Mapping[str, str]) -> str:
    """The command to show long text with, "" for none. wanted: the setting `pager`."""
    command = wanted if isinstance(wanted, str) else env.get("PAGER", DEFAULT) if wanted else ""
    return "" if command.strip() in ("", "cat") else command


def fits(text: str) -> bool:
    """Whether the text is no longer than the terminal."""
    return text.count("\n") < shutil.get_terminal_size().lines


def page(text: str, command: str, env: Mapping[str, str]) -> bool:
    """Shows the text; False where the pager cannot be run. It may be left before the end."""
    with _interrupts_are_the_pagers():
        try:
            pager = subprocess.Popen(
                command, shell=True, stdin=subprocess.PIPE, env={"LESS": LESS, "LV": "-c", **env}
            )
        except OSError:
            return False
        assert pager.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pager.stdin.write(text.encode("utf-8", "backslashreplace"))
        with contextlib.suppress(BrokenPipeError):
            pager.stdin.close()
        return pager.wait() not in _NOT_THERE


@contextlib.contextmanager
def _interrupts_are_the_pagers() -> Iterator[None]:
    """Ctrl-C reaches the pager, which knows what to do with it, and us, who wait for its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
