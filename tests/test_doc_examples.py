"""Every example of the README and the site runs, and prints what the page shows.

See docs/writing.md for what a page may say of its examples. All pages begin with examples/docs in
the store of the default model, in a folder of their own, unless they say they begin with nothing.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbcli.main import app
from engine.tokenizer import Tokenizer
from tests.cbcli.terminal import run as run_cacheblend
from tests.docs.blocks import Block, blocks, commands
from tests.docs.compare import alike, difference
from tests.docs.shell import ROOT, Shell, cacheblend_calls

PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
}
BLOCKS = {name: blocks(path, name) for name, path in PAGES.items()}
EXAMPLES = {
    name: found
    for name, page in BLOCKS.items()
    if (found := [block for block in page if block.is_example])
}
EMPTY = "<!-- begins with an empty store -->"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder pages run in, and what it holds at the beginning: examples and a filled store."""
    place = tmp_path_factory.mktemp("pages")
    work, kept = place / "work", place / "kept"
    shutil.copytree(ROOT / "examples", work / "examples", ignore=shutil.ignore_patterns("__*"))
    (work / ".cache").mkdir()
    (work / ".cache/models").symlink_to(ROOT / ".cache/models")
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, work)
        done = run_cacheblend("ingest", "examples/docs")
    assert done.exit_code == 0, done.output
    work.rename(kept)
    return work, kept


@pytest.fixture(scope="module")
def tokenizer_is_kept() -> Iterator[None]:
    """Reading it takes half a second of each command; it is the same every time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "load", staticmethod(functools.cache(Tokenizer.load)))
        yield


@pytest.fixture
def page_folder(
    stored: tuple[Path, Path],
    tokenizer_is_kept: None,
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    work, kept = stored
    shutil.copytree(kept, work, symlinks=True, copy_function=linked)
    settle(monkeypatch, work)
    yield work
    os.chdir(kept)
    shutil.rmtree(work)


def settle(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.chdir(folder)
    patch.setenv("CACHEBLEND_HOME", str(folder / "home"))
    patch.setenv("CACHEBLEND_MODELS_DIR", str(folder / ".cache/models"))
    patch.setenv("HF_HUB_OFFLINE", "1")


def linked(source: str, target: str) -> None:
    """Chunk files are never written to, so the pages share them."""
    (os.link if source.endswith(".kv") else shutil.copy2)(source, target)


@pytest.mark.model
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_page_is_true(name: str, page_folder: Path) -> None:
    if EMPTY in PAGES[name].read_text("utf-8"):
        shutil.rmtree(page_folder / "home")
    if any("| jq" in block.text for block in EXAMPLES[name]) and not shutil.which("jq"):
        assert "CI" not in os.environ
        pytest.skip("there is no jq")
    wanted = {block.line for block in EXAMPLES[name] if not block.not_run}
    assert run_page(EXAMPLES[name], page_folder) == wanted


def run_page(page: list[Block], folder: Path) -> set[int]:
    """The lines of the blocks that were run."""
    shell, names, printed, ran = Shell(folder), {"__name__": "__main__"}, "", set()
    for block in page:
        where = f"{block.page}:{block.line}"
        if block.not_run:
            continue
        ran.add(block.line)
        if block.is_output:
            assert not (wrong := difference(block.text, printed)), f"{where}\n{wrong}"
        elif block.file:
            path = folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, "utf-8")
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(block.text, where, "exec"), names)  # noqa: S102
            printed = said.getvalue()
        else:
            for command in commands(block):
                done = shell.run(command.text)
                shown = command.output
                printed = done.outputs[-1]
                if not re.search(r";|\|\|", command.text):  # else the code is another's
                    fails = shown is not None and re.search("^error: ", shown, re.MULTILINE)
                    assert bool(done.code) == bool(fails), f"{where}: {command.text}\n{printed}"
                if shown is not None:
                    wrong = [difference(shown, output) for output in done.outputs]
                    assert not all(wrong), f"{where}: {command.text}\n{wrong[-1]}"
    return ran


def test_an_example_says_in_which_language_it_is() -> None:
    """Else it would be no example, and never run."""
    plain = [
        f"{block.page}:{block.line}"
        for page in BLOCKS.values()
        for block in page
        if not block.is_example and re.search(r"^\$ ", block.text, re.MULTILINE)
    ]
    assert plain == []


def test_most_pages_run_and_a_reason_is_given_where_not() -> None:
    left_out = [block for page in EXAMPLES.values() for block in page if block.not_run]
    assert all(len(block.not_run) > 8 for block in left_out)
    unknown = [
        f"{block.page}:{block.line}: {block.note}"
        for page in BLOCKS.values()
        for block in page
        if re.match("not[ -]?run|skip|file|output", block.note)
        and not (block.not_run or block.file or block.is_output)
    ]
    assert unknown == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_not_run_has_commands_and_flags_that_exist(name: str) -> None:
    for block in EXAMPLES[name]:
        if block.not_run and block.language != "python":
            for command in commands(block):
                for words in cacheblend_calls(command.text):
                    parses(words, f"{block.page}:{block.line}: {command.text}")


def parses(words: list[str], where: str) -> None:
    import typer

    command: Any = typer.main.get_command(app)
    context, name = None, "cacheblend"
    while True:
        try:
            context = command.make_context(name, list(words), parent=context)
        except typer.Exit:  # --help, --version
            return
        except Exception as error:
            raise AssertionError(f"{where}\n{error}") from error
        if not hasattr(command, "commands"):
            return
        words = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("2 documents (2 new), 57.0 MB, in 3.4 s", "2 documents (2 new), 900 kB, in 70 ms", True),
        ("2 documents (2 new)", "3 documents (3 new)", False),
        ("44 chunks, 17,942 tokens", "47 chunks, 18,102 tokens", True),
        ("44 chunks, 17,942 tokens", "44 chunks, 9,102 tokens", False),
        ("a27a5465c2be  one.md   438", "00ff5465c2be  one.md  438", True),
        ("first token after 263 ms, 2.3x", "first token after 1.2 s, 0.9x", True),
        ("first token after 263 ms", "first token after 263 MB", False),
        ("In … 1987.", "In the year 1987.", True),
        ("In … 1987.", "In the year 1988.", False),
    ],
)
def test_lines_are_compared_by_their_words(shown: str, printed: str, same: bool) -> None:
    assert alike(shown, printed) is same


def test_dots_alone_are_any_lines() -> None:
    assert difference("a\n…\nd", "a\nb\nc\nd\n") == ""
    assert difference("a\n…\nd", "a\nd") == ""
    assert difference("a\n…\nd", "a\nb") != ""
