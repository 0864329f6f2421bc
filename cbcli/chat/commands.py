"""What begins with a slash: commands of a conversation."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cache_store.errors import UsageError
from cbcli.chat.talk import Talk
from cbcli.chat.transcript import save
from cbcli.citations import where
from cbcli.command import nearest
from cbcli.declared import DECLARED, POLICIES
from cbcli.output import Output
from cbcli.records import chunk_record
from cbcli.traces import save_in, traces_root
from cbcli.values import AUTO


class Leave(Exception):
    """The conversation is over."""


@dataclass(frozen=True)
class SlashCommand:
    """One of them. arguments: as help shows them; words: what may be completed behind it."""

    name: str
    arguments: str
    help: str
    run: Callable[[Commands, str], None]
    words: tuple[str, ...] = ()


class Commands:
    """Runs commands on a conversation. views: whether a viewer can be opened in this terminal."""

    def __init__(self, talk: Talk, out: Output, *, views: bool = False) -> None:
        self.talk, self.out, self.views = talk, out, views

    def __call__(self, line: str) -> None:
        """Raises UsageError, which names the nearest one, for one that isn't there; Leave."""
        name, _, rest = line.strip().removeprefix("/").partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            near = nearest(name, list(COMMANDS))
            raise UsageError(
                f"no such command: /{name}",
                f"did you mean /{near}?"
                if near
                else "/help lists them; a question may begin with a space",
            )
        command.run(self, rest.strip())

    def help(self, rest: str) -> None:
        if self.out.json:
            known = [{"name": c.name, "arguments": c.arguments, "help": c.help} for c in _ALL]
            self.out.data({"command": "help", "commands": known})
            return
        self.out.pairs((f"/{c.name} {c.arguments}".rstrip(), c.help) for c in COMMANDS.values())

    def chunks(self, rest: str) -> None:
        spoken = self.talk.last
        if spoken is None:
            self.out.note("no turn was answered yet")
            return
        statuses = {
            s.chunk_id: s.status for s in spoken.result.prompt.segments if s.kind == "chunk"
        }
        cited = {number for number, _ in spoken.cited.cited()} if spoken.cited else set()
        if self.out.json:
            records = [
                {
                    "number": number,
                    "status": statuses.get(chunk.chunk_id),
                    "cited": number in cited,
                    **chunk_record(chunk),
                }
                for number, chunk in spoken.chunks.items()
            ]
            self.out.data({"command": "chunks", "turn": spoken.done.turn, "chunks": records})
            return
        rows = [
            (
                f"[{number}]" + ("*" if number in cited else ""),
                statuses.get(chunk.chunk_id, ""),
                chunk.tokens,
                chunk.chunk_id[:12],
                where(chunk),
            )
            for number, chunk in spoken.chunks.items()
        ]
        self.out.table(["number", "KV", "tokens", "chunk", "from"], rows, right=["tokens"])

    def setting(self, name: str) -> Callable[[str], None]:
        """What changes a setting, or shows it."""

        def run(rest: str) -> None:
            if rest:
                self.talk.change(name, rest)
            value = getattr(self.talk.settings, name)
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            if name == "ratio" and value == AUTO:
                shown = "auto"
            self.out.note(f"{name} is {shown}")

        return run

    def cite(self, rest: str) -> None:
        if rest not in ("", "on", "off"):
            raise UsageError(f"/cite {rest}: neither on nor off", "write /cite on or /cite off")
        wanted = rest == "on" if rest else not self.talk.settings.cite
        self.talk.change("cite", str(wanted).lower())
        self.out.note(f"citations are {'on' if wanted else 'off'}")

    def inspect(self, rest: str) -> None:
        spoken = self.talk.last
        trace = spoken.result.trace if spoken is not None else None
        if trace is None:
            raise UsageError("no turn was recorded yet", "ask something first")
        said: list[str] = []
        if rest:
            path = Path(rest).expanduser()
            save_in(trace, path, said.append)
        else:
            path = traces_root() / f"{trace.id}.cbtrace"
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not path.exists():
                save_in(trace, path, said.append)
        for line in said:
            self.out.warn(line)
        if said:
            return
        command = ["cacheblend", "inspect", str(path)]
        if not self.views or rest:
            self.out.note(f"the turn's trace: {shlex.join(command)}")
            return
        ours = "from cbcli.entry import main; main()"
        subprocess.run([sys.executable, "-c", ours, *command[1:]], check=False)

    def new(self, rest: str) -> None:
        self.talk.begin_anew()
        self.out.note("a new conversation")

    def save(self, rest: str) -> None:
        if not rest:
            raise UsageError("/save: no file was named", "write /save talk.json")
        path = Path(rest).expanduser()
        save(self.talk, path)
        self.out.note(f"wrote {path}; chat --resume {shlex.quote(str(path))} goes on from there")

    def quit(self, rest: str) -> None:
        raise Leave


def _sets(name: str) -> Callable[[Commands, str], None]:
    return lambda commands, rest: commands.setting(name)(rest)


_ALL = (
    SlashCommand("help", "", "These commands", Commands.help),
    SlashCommand("chunks", "", "The chunks of this conversation; * was cited", Commands.chunks),
    SlashCommand("ratio", "[0.05]", DECLARED["ratio"].help, _sets("ratio"), ("auto",)),
    SlashCommand(
        "policy",
        "[NAME]",
        "What selects tokens",
        _sets("policy"),
        tuple(name for name in POLICIES if name != "explicit"),
    ),
    SlashCommand("topk", "[N]", DECLARED["top_k"].help, _sets("top_k")),
    SlashCommand(
        "cite", "[on|off]", "Numbers of documents in answers", Commands.cite, ("on", "off")
    ),
    SlashCommand("inspect", "[FILE]", "Look at how the last turn was computed", Commands.inspect),
    SlashCommand("new", "", "Begin a new conversation", Commands.new),
    SlashCommand("save", "FILE", "Write the conversation to a file", Commands.save),
    SlashCommand("quit", "", "Leave, as Ctrl-D does", Commands.quit),
)
COMMANDS = {command.name: command for command in _ALL}


def is_command(line: str) -> bool:
    """Whether a line is no question: it begins with a slash."""
    return line.startswith("/")
