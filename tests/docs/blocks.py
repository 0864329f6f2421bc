"""The fenced examples of a page of Markdown, and what the page says of them in HTML comments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUN = ("console", "sh", "python")
_COMMENT = re.compile(r"^\s*<!--\s*(?P<text>.*?)\s*-->\s*$")
_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})(?P<language>[\w-]*)(?P<rest>.*)$")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language and text, and the comment right above it."""

    page: str
    line: int  # of the fence, from 1
    language: str
    text: str
    note: str  # "" where there is no comment

    @property
    def not_run(self) -> str:
        """The reason why it isn't run, or ""."""
        return self.note.removeprefix("not run:").strip() if self._says("not run:") else ""

    @property
    def file(self) -> str:
        """The name of the file it is, or ""."""
        return self.note.removeprefix("file:").strip() if self._says("file:") else ""

    @property
    def is_output(self) -> bool:
        """Whether it is what the block before it prints."""
        return self.note == "output"

    @property
    def is_example(self) -> bool:
        return bool(self.language in RUN or self.file or self.is_output)

    def _says(self, word: str) -> bool:
        return self.note.startswith(word)


@dataclass(frozen=True)
class Command:
    """A line of a console or sh block, and what it is said to print (None: not said)."""

    text: str
    output: str | None


def blocks(path: Path, name: str) -> list[Block]:
    """All fenced blocks of a page, in order. `name` is what failures call the page."""
    found: list[Block] = []
    note, opened, inside = "", None, []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if opened is not None:
            start, fence = opened
            if line.strip() == fence["ticks"]:
                text = "\n".join(row.removeprefix(fence["indent"]) for row in inside) + "\n"
                found.append(Block(name, start, fence["language"], text, note))
                note, opened, inside = "", None, []
            else:
                inside.append(line)
        elif (fence := _FENCE.match(line)) is not None:
            opened = number, fence
        elif (comment := _COMMENT.match(line)) is not None:
            note = comment["text"]
        elif line.strip():
            note = ""
    assert opened is None, f"{name}: the block of line {opened[0]} has no end"
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a block: a console's stand behind `$`, a script's are its lines."""
    if block.language == "sh":
        return [Command(text, None) for text in _whole(block.text.splitlines())]
    found: list[Command] = []
    given: list[str] = []
    output: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if given:
                found.append(Command("\n".join(given), "\n".join(output)))
            given, output = [line[2:]], []
        elif given and not output and not _complete("\n".join(given)):
            given.append(line.removeprefix("> "))
        else:
            output.append(line)
    assert given, f"{block.page}:{block.line}: a console block without a command"
    return [*found, Command("\n".join(given), "\n".join(output))]


def _whole(lines: list[str]) -> list[str]:
    found, given = [], ""
    for line in lines:
        given = f"{given}\n{line}" if given else line
        if not given.strip() or given.lstrip().startswith("#"):
            given = ""
        elif _complete(given):
            found.append(given)
            given = ""
    assert not given, f"no end: {given}"
    return found


def _complete(text: str) -> bool:
    """Whether a shell would run it rather than wait for more."""
    here = re.search(r"<<-?\s*['\"]?(\w+)", text)
    if here is not None:
        return text.splitlines()[-1].strip() == here[1]
    bare = bare_words(text)
    if "'" in bare or '"' in bare or text.endswith("\\"):
        return False
    words = re.findall(r"(?:^|[;\n]|&&)\s*(for|while|if|done|fi)\b", bare)
    return sum(1 if word in ("for", "while", "if") else -1 for word in words) == 0


def bare_words(text: str) -> str:
    """A command line without what is quoted in it, and without its comments."""
    quoted = r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|(?:(?<=\s)|^)#[^\n]*"
    return re.sub(quoted, "", text, flags=re.DOTALL | re.MULTILINE)
