"""A conversation in a terminal: a prompt with history and completion, answers as they come."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth

from cbcli.chat.commands import COMMANDS, Commands, Leave, is_command
from cbcli.chat.lines import tell
from cbcli.chat.status import status_line
from cbcli.chat.stopping import stopping
from cbcli.chat.talk import Talk
from cbcli.errors import describe
from cbcli.output import Output
from cbcli.settings import data_root
from cbcli.text import one_line

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output as Screen

HISTORY = "chat_history"


class Conversing:
    """Asks for questions and answers them, until Ctrl-D or /quit.

    keys, screen: other ones than the terminal's, for tests.
    """

    def __init__(
        self,
        talk: Talk,
        out: Output,
        *,
        keys: Input | None = None,
        screen: Screen | None = None,
    ) -> None:
        self.talk, self.out = talk, out
        self._commands = Commands(talk, out, views=True)
        self._status = ""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=history(data_root() / HISTORY, out),
            completer=SlashCompleter(),
            complete_while_typing=False,
            key_bindings=bindings(),
            multiline=True,
            prompt_continuation="  ",
            bottom_toolbar=lambda: self._status or None,
            color_depth=ColorDepth.DEPTH_1_BIT if plain else None,
            input=keys,
            output=screen,
        )

    def __call__(self) -> None:
        self._status = one_line(f"{self.talk.engine.info.name}; /help, Ctrl-D leaves")
        while True:
            try:
                line = self._session.prompt()
                if not line.strip():
                    continue
                if is_command(line):
                    self._commands(line)
                else:
                    self._answer(line.strip())
            except KeyboardInterrupt:
                self.out.end_pieces()
                continue
            except (EOFError, Leave):
                return
            except Exception as error:  # whatever one turn ran into, the talk goes on
                self.out.error(describe(error))

    def _answer(self, question: str) -> None:
        try:
            with stopping() as stopper:
                spoken = self.talk.turn(
                    question,
                    on_text=self.out.piece,
                    interrupted=lambda: stopper.asked,
                    observer=stopper,
                )
        except KeyboardInterrupt:
            self.out.end_pieces()
            self.out.note("stopped: the conversation is as it was before this question")
            return
        tell(self.out, spoken)
        self._status = status_line(spoken)


def history(path: Path, out: Output) -> History:
    """Of what was typed, in a file of the user alone; in memory where there can be none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        path.chmod(0o600)
    except OSError as error:
        out.warn(f"{path}: {error.strerror or error}: what is typed is not kept")
        return InMemoryHistory()
    return FileHistory(path)


def bindings() -> KeyBindings:
    """Enter sends, Alt-Enter begins another line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class SlashCompleter(Completer):
    """Commands, and what can stand behind them."""

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Any]:
        yield from completions(document.text_before_cursor)


def completions(text: str) -> Iterator[Completion]:
    """What `text` may go on with."""
    if not is_command(text) or "\n" in text:
        return
    name, space, rest = text.removeprefix("/").partition(" ")
    if not space:
        for command in COMMANDS.values():
            if command.name.startswith(name):
                yield Completion(f"/{command.name}", -len(text), display_meta=command.help)
        return
    known = COMMANDS.get(name)
    for word in known.words if known is not None else ():
        if word.startswith(rest):
            yield Completion(word, -len(rest))
