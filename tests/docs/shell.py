"""Runs the commands of an example: `cacheblend` in this process, the rest in bash."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.cbcli.terminal import run as run_cacheblend

ROOT = Path(__file__).parents[2]
_EXPANDS = re.compile(r"[$`*?~;&(){}\[\]]|<<")


@dataclass(frozen=True)
class Done:
    code: int
    outputs: tuple[str, ...]  # the same text with stderr in one place or another


@dataclass(frozen=True)
class Stage:
    """One command of a pipeline: its words, and files it reads from and writes to."""

    text: str
    settings: dict[str, str]  # NAME=VALUE in front of it
    words: list[str]
    source: str = ""
    target: str = ""

    @property
    def is_ours(self) -> bool:
        bare = re.sub(r"'[^']*'", "", self.text)
        bare = re.sub(r'"[^"$`]*"', "", bare)
        return self.words[:1] == ["cacheblend"] and not _EXPANDS.search(bare)


@dataclass(frozen=True)
class Shell:
    """`folder` is where commands run. Settings come from this process's environment."""

    folder: Path

    def __post_init__(self) -> None:
        """A `cacheblend` for what only bash can do, and the `python` that runs the tests."""
        bin = self.folder / ".bin"
        bin.mkdir(exist_ok=True)
        code = "from cbcli.entry import main; main()"
        for name, words in (("cacheblend", f"-c '{code}' \"$@\""), ("python", '"$@"')):
            (bin / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}\n")
            (bin / name).chmod(0o755)

    def run(self, text: str) -> Done:
        text = text.replace("$PWD", str(self.folder))
        try:
            stages = [_stage(part) for part in _pipeline(text)]
        except ValueError:  # not simple words
            stages = []
        if not any(stage.is_ours for stage in stages):
            return self._bash(text)
        out, said, code = "", "", 0
        mixed = ""
        for stage in stages:
            given = (self.folder / stage.source).read_text("utf-8") if stage.source else out
            if stage.is_ours:
                done = run_cacheblend(*stage.words[1:], input=given, env=stage.settings)
                if done.exception and not isinstance(done.exception, SystemExit):
                    raise done.exception
                out, mixed, code = done.stdout, done.output, done.exit_code or code
                said += done.stderr
            else:
                other = self._process(stage.text, given)
                out, code = other.stdout, other.returncode or code
                said += other.stderr
                mixed = other.stdout
        if stages[-1].is_ours and stages[-1].target:  # bash does it where it runs
            (self.folder / stages[-1].target).write_text(out, "utf-8")
            out, mixed = "", said
        return Done(code, (mixed, said + out, out + said))

    def _bash(self, text: str) -> Done:
        done = self._process(text, "")
        return Done(done.returncode, (done.stderr + done.stdout, done.stdout + done.stderr))

    def _process(self, text: str, given: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / '.bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail\n{text}"],
            input=given,
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=120,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        )


def cacheblend_calls(text: str) -> list[list[str]]:
    """The words behind each `cacheblend` of a command line, so far as they can be told."""
    calls = []
    for part in _pipeline(text):
        try:
            words = _stage(part).words
        except ValueError:
            continue
        if words[:1] == ["cacheblend"]:
            calls.append([word for word in words[1:] if word != "&"])
    return calls


def _pipeline(text: str) -> list[str]:
    """The commands of a pipeline; `|` within quotes is text, `||` isn't taken apart."""
    parts = re.split(r"((?:'[^']*'|\"(?:\\.|[^\"\\])*\"|[^'\"|]|\|\|)+)", text.strip())
    return [part.strip() for part in parts if part.strip(" |\n")]


def _stage(text: str) -> Stage:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="<>")
    lexer.whitespace_split = True
    words, ends = [], {"<": "", ">": ""}
    tokens = list(lexer)
    while tokens:
        word = tokens.pop(0)
        if word in ends and tokens:
            ends[word] = tokens.pop(0)
        else:
            words.append(word)
    settings = {}
    while words and (setting := re.fullmatch(r"([A-Z_]+)=(.*)", words[0], re.DOTALL)):
        settings[setting[1]] = setting[2]
        del words[0]
    return Stage(text, settings, words, ends["<"], ends[">"])
