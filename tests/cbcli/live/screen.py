"""A pseudo terminal to run a command on, and the screen that what was written to it makes."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len

from cbcli.main import app

_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """As much of a terminal as the live views use; anything else in what is written fails. Lines
    that leave it at the top are kept: `lines` has all of them."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.at = self.column = 0
        self.cursor = True

    def write(self, text: str) -> Screen:
        for sequence in _TOKEN.finditer(text):
            numbers, letter, char = sequence.groups()
            if char is not None:
                self._char(char)
            elif letter == "A":
                top = max(0, len(self.lines) - self.rows)
                self.at = max(top, self.at - int(numbers or 1))
            elif letter == "K":
                assert numbers == "2"
                self.lines[self.at] = ""
            elif letter in "hl":
                assert numbers == "?25"
                self.cursor = letter == "h"
            else:
                assert letter == "m", sequence.group()
        return self

    def _char(self, char: str) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.at, self.column = self.at + 1, 0
            if self.at == len(self.lines):
                self.lines.append("")
        else:
            assert char.isprintable(), repr(char)
            if cell_len(self.lines[self.at][: self.column] + char) > self.columns:
                self._char("\n")
            line = self.lines[self.at]
            self.lines[self.at] = line[: self.column] + char + line[self.column + 1 :]
            self.column += 1

    @property
    def shown(self) -> list[str]:
        return [line.rstrip() for line in self.lines if line.strip()]


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def terminal() -> Iterator[tuple[io.TextIOWrapper, list[bytes]]]:
    """A stream that is a terminal, and the pieces of what was written to it, complete at the
    end."""
    master, slave = pty.openpty()
    read: list[bytes] = []

    def reading() -> None:
        with contextlib.suppress(OSError):  # EIO: the other end was closed
            while piece := os.read(master, 65536):
                read.append(piece)

    thread = threading.Thread(target=reading)
    thread.start()
    stream = os.fdopen(slave, "w", encoding="utf-8", errors="backslashreplace")
    try:
        yield stream, read
    finally:
        stream.close()
        thread.join(10)
        os.close(master)


def run_on_terminal(*args: str) -> Ran:
    """Runs the command in this process: stderr a terminal, stdout not."""
    before = sys.stdout, sys.stderr
    stdout = io.StringIO()
    with terminal() as (stream, read):
        sys.stdout, sys.stderr = stdout, stream
        code = 0
        try:
            app(list(args))
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.stdout, sys.stderr = before
    return Ran(code, stdout.getvalue(), b"".join(read).decode())
