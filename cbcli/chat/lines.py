"""A conversation without a terminal: one question a line, or a command."""

from __future__ import annotations

from collections.abc import Iterable

from cbcli.chat.commands import Commands, Leave, is_command
from cbcli.chat.status import status_line
from cbcli.chat.talk import Spoken, Talk
from cbcli.errors import Failure, describe
from cbcli.output import Output


class Lines:
    """Answers lines as they come. failure: the first of those that could not be answered."""

    def __init__(self, talk: Talk, out: Output) -> None:
        self.talk, self.out = talk, out
        self.failure: Failure | None = None
        self._commands = Commands(talk, out)

    def __call__(self, lines: Iterable[bytes]) -> None:
        """Until there are no more, or one says /quit."""
        for raw in lines:
            line = raw.decode("utf-8", "replace").removeprefix("\ufeff").rstrip("\r\n")
            if not line.strip():
                continue
            try:
                if is_command(line):
                    self._commands(line)
                else:
                    self._answer(line.strip())
            except Leave:
                return
            except Exception as error:  # whatever one line ran into, the others are answered
                failure = describe(error)
                self.failure = self.failure or failure
                self.out.error(failure)

    def _answer(self, question: str) -> None:
        on_text = None if self.out.json else self.out.piece
        tell(self.out, self.talk.turn(question, on_text=on_text))


def tell(out: Output, spoken: Spoken) -> None:
    """All of a turn but its answer, which was streamed; with --json, all of it."""
    out.end_pieces()
    for note in spoken.notes:
        out.warn(note)
    if out.json:
        out.data(spoken.to_json())
        return
    if spoken.cited is not None and spoken.result.finish_reason != "interrupted":
        spoken.cited.print(out)
    out.note(status_line(spoken))
