"""What is read of a folder: ignore files, hidden files, links, globs, types, lists; and that the
walk goes on whatever it comes upon."""

from __future__ import annotations

import errno
import os
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import UsageError
from engine.documents import FileChoice, FoundFile, Skipped, Unreadable, find_files, read_documents
from engine.documents.filetypes import file_types, known_type
from engine.documents.finding import lines_of

STRESS = float(os.environ.get("CACHEBLEND_STRESS", "1"))


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tree(*names: str, **files: str) -> None:
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")


def rules(path: str, *lines: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{line}\n" for line in lines))


def short(source: str) -> str:
    return source.removeprefix(f"{Path.cwd().as_posix()}/")


def read(*paths: str, listed: Iterator[str] | list[str] = [], **choice: Any) -> list[str]:  # noqa: B006
    """The files that are read."""
    found = find_files(paths or ["."], choice=FileChoice(**choice), listed=listed)
    return [short(item.source) for item in found if isinstance(item, FoundFile)]


def left_out(*paths: str, **choice: Any) -> dict[str, str]:
    found = find_files(paths or ["."], choice=FileChoice(**choice))
    return {short(item.source): item.reason for item in found if isinstance(item, Skipped)}


def unreadable(*paths: str, **choice: Any) -> dict[str, str]:
    found = find_files(paths or ["."], choice=FileChoice(**choice))
    return {short(item.source): item.reason for item in found if isinstance(item, Unreadable)}


# --- ignore files ---------------------------------------------------------------------------


def test_ignored_files_and_folders_are_left_out_and_told() -> None:
    tree("a.md", "a.log", "build/x.md", "build/deep/y.md", "d/keep.log", "d/b.log", "d/build")
    rules(".gitignore", "*.log", "!keep.log", "build/")
    assert read() == ["a.md", "d/build", "d/keep.log"]
    assert left_out() == {
        ".gitignore": "hidden",
        "a.log": "ignored",
        "build": "ignored",  # and nothing is said of what is in it
        "d/b.log": "ignored",
    }
    assert read(ignore=False) == [
        *("a.log", "a.md", "build/deep/y.md", "build/x.md"),
        *("d/b.log", "d/build", "d/keep.log"),
    ]


def test_ignored_folders_are_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    tree("a.md", "node_modules/x/y.md")
    rules(".gitignore", "node_modules")
    scanned: list[str] = []
    scandir = os.scandir

    def watched(path: str) -> Any:
        scanned.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", watched)
    assert read() == ["a.md"]
    assert scanned == ["."]


def test_the_own_ignore_file_is_the_strongest_then_the_nearest() -> None:
    tree("a.txt", "b.txt", "c.txt", "d/a.txt", "d/b.txt", "d/c.txt")
    rules(".gitignore", "*.txt")
    rules(".ignore", "!b.txt", "!c.txt")
    rules(".cacheblendignore", "c.txt")
    rules("d/.gitignore", "!a.txt")
    rules("d/.ignore", "b.txt")
    assert read() == ["b.txt", "d/a.txt"]
    rules("d/.cacheblendignore", "!*")
    assert read() == ["b.txt", "d/a.txt", "d/b.txt", "d/c.txt"]


def test_what_is_typed_is_read_whatever_the_rules_say() -> None:
    tree("a.log", ".hidden/b.md", "build/c.md", "build/d.log")
    rules(".ignore", "*.log", "build/")
    assert read("a.log", ".hidden", "build") == ["a.log", ".hidden/b.md", "build/c.md"]
    assert read(".", "a.log", types=("pdf",)) == ["a.log"]
    assert read("build", "build/d.log", max_bytes=3) == ["build/d.log"]


def test_rules_above_the_folder_hold_gits_up_to_its_repository() -> None:
    tree("r/d/e/a.md", "r/d/e/b.log", "r/d/e/c.tmp", "r/d/e/top.md", "r/d/e/x.md", "r/d/e/own.md")
    rules(".gitignore", "a.md")
    rules(".ignore", "top.md")
    rules("r/.git/info/exclude", "x.md")
    rules("r/.gitignore", "*.log", "/d/e/own.md", "/e")
    rules("r/d/.gitignore", "*.tmp")
    assert read("r/d/e") == ["r/d/e/a.md"]
    assert read("r") == ["r/d/e/a.md"]
    assert read() == ["r/d/e/a.md"]  # a repository of its own
    os.chdir("r/d/e")
    assert read() == ["a.md"]


def test_a_repository_in_another_has_rules_of_its_own() -> None:
    tree("a.log", "sub/a.log", "sub/b.md", "tree/c.log", "tree/d.md")
    rules(".git/config")
    rules(".gitignore", "*.log")
    rules("sub/.git/info/exclude", "b.md")
    rules("main/info/exclude", "d.md")
    rules("main/worktrees/tree/commondir", "../..")
    rules("tree/.git", "gitdir: ../main/worktrees/tree")
    assert read("sub", "tree") == ["sub/a.log", "tree/c.log"]
    assert read() == ["main/info/exclude", "main/worktrees/tree/commondir", *read("sub", "tree")]


def test_hidden_files() -> None:
    tree("a.md", ".b.md", ".notes/c.md", ".git/d.md", ".notes/.e.md")
    assert read() == ["a.md"]
    assert read(hidden=True) == [".b.md", ".git/d.md", ".notes/.e.md", ".notes/c.md", "a.md"]
    rules(".gitignore", "!*", "!.b.md")  # which is about git
    assert read() == ["a.md"]
    rules(".cacheblendignore", "!*", "!.notes/")
    assert read() == [".notes/c.md", "a.md"]


def test_an_ignore_file_that_cannot_be_read_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tree("d/a.md")
    rules("d/.gitignore", "a.md")
    _fail_to_open(monkeypatch, "d/.gitignore")
    assert unreadable("d") == {"d/.gitignore": "its rules: permission denied"}
    assert read("d") == ["d/a.md"]


def test_odd_ignore_files() -> None:
    tree("a.md", "b.md", "c.md", "café.md")
    Path(".ignore").mkdir()
    os.mkfifo(".cacheblendignore")
    Path(".gitignore").write_bytes(b"\xef\xbb\xbfa.md\r\n\0\xff[\r\nb.md\ncaf\xc3\xa9.md")
    assert read() == ["c.md"]


@pytest.mark.parametrize("seed", range(3))
def test_git_leaves_out_the_same(seed: int) -> None:
    import random

    pick = random.Random(seed)
    names = ["a", "b", "ab", "a.md", "b.md", "x.log", "doc", "doc.txt", "[a]", "a b", "!n", "#h"]
    parts = ["*", "?", "a", "b", "*.md", "**", "a*", "*b", "[ab]", "[!a]", "doc*", "x.log"]
    parts += ["\\[a\\]", "[[:alpha:]]", "*.*", "[^a]*", "[]a]", "[", "\\a", "a\\", "[b-a]", "[/a]"]

    def pattern() -> str:
        text = "/".join(pick.choice(parts) for _ in range(pick.choice([1, 1, 1, 2, 3])))
        before, after = pick.choice(["", "", "/", "!", "!/"]), pick.choice(["", "", "", "/", "  "])
        return before + text + after

    def fill(folder: Path, depth: int) -> None:
        folder.mkdir()
        for name in pick.sample(names, pick.randint(1, 5)):
            if depth and pick.random() < 0.5 and "." not in name:
                fill(folder / name, depth - 1)
            else:
                (folder / name).write_text("x")
        if pick.random() < 0.6:
            lines = [pattern() + pick.choice(["\n", "\r\n"]) for _ in range(pick.randint(1, 5))]
            (folder / ".gitignore").write_bytes("".join(lines).encode())

    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    for number in range(int(8 * STRESS)):
        root = Path(f"tree{number}")
        fill(root, 3)
        subprocess.run(["git", "init", "-q", root], check=True, env=env)
        git = ["git", "-C", str(root), "ls-files", "-z", "--others", "--exclude-standard"]
        listed = subprocess.run(git, check=True, env=env, capture_output=True, text=True).stdout
        wanted = {f"{root}/{name}" for name in listed.split("\0") if name}
        found = set(read(str(root)))
        assert found == {name for name in wanted if "/." not in name}, _all_rules(root)


def _all_rules(root: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in root.rglob(".gitignore")}


# --- globs, types, sizes --------------------------------------------------------------------


def test_globs() -> None:
    tree("a.md", "a.py", "d/b.md", "d/c.txt", "old/d.md", ".e.md", "log/f.md")
    rules(".gitignore", "log/", "d/b.md")
    assert read(globs=("*.md",)) == ["a.md", "d/b.md", "old/d.md"]  # above ignore files
    assert read(globs=("*.{md,py}", "!old/")) == ["a.md", "a.py", "d/b.md"]
    assert read(globs=("!*.md",)) == ["a.py", "d/c.txt"]
    assert read(globs=("!*.md", "a.md")) == ["a.md"]
    assert read(globs=("/*.md",)) == ["a.md"]
    assert read("d", globs=("d/*.txt",)) == ["d/c.txt"]  # counted from the current folder
    assert read(globs=(".*.md",)) == [".e.md"]
    assert read(globs=("log/**", "log")) == ["log/f.md"]
    assert left_out(globs=("!a.md",))["a.md"] == "other name"
    with pytest.raises(UsageError, match="no glob"):
        FileChoice(globs=("[",))


def test_globs_count_from_the_folder_where_it_lies_elsewhere(tmp_path: Path) -> None:
    tree("far/d/a.md", "far/b.md", "here/x")
    os.chdir("here")
    found = find_files([tmp_path / "far"], choice=FileChoice(globs=("/d/*.md",)))
    assert [Path(i.source).name for i in found if isinstance(i, FoundFile)] == ["a.md"]


def test_types() -> None:
    tree("a.md", "b.MARKDOWN", "c.py", "Makefile", "e.pdf", "f.rst", "g.txt", "h")
    assert read(types=("md",)) == ["a.md", "b.MARKDOWN"]
    assert read(types=("code", "pdf")) == ["Makefile", "c.py", "e.pdf"]
    assert read(not_types=("code", "rst")) == ["a.md", "b.MARKDOWN", "e.pdf", "g.txt", "h"]
    assert read(types=("text",), not_types=("rst",)) == ["g.txt"]
    assert left_out(types=("md",))["c.py"] == "other type"
    assert [known_type(t) for t in ("md", ".py", "htm", "ipynb", "TXT", "rst", "h")] == [
        *("markdown", "python", "html", "notebook", "text", "rst", "c"),
    ]
    with pytest.raises(UsageError, match="no file type 'pyton'") as caught:
        FileChoice(types=("pyton",))
    assert "did you mean python?" in caught.value.hint
    assert all(names for names in file_types().values())


def test_sizes() -> None:
    Path("small.md").write_text("x" * 10)
    Path("large.md").write_text("x" * 11)
    assert read(max_bytes=10) == ["small.md"]
    assert left_out(max_bytes=10) == {"large.md": "too large"}


# --- links ----------------------------------------------------------------------------------


def test_links_are_followed_when_asked_for_and_loops_end() -> None:
    tree("d/a.md", "d/sub/b.md", "far/c.md", "far/one.md")
    Path("d/up").symlink_to("..")
    Path("d/self").symlink_to(".")
    Path("d/sub/far").symlink_to("../../far")
    Path("far/back").symlink_to("../d")
    Path("d/one.md").symlink_to("../far/one.md")
    Path("d/broken").symlink_to("nowhere")
    assert read("d") == ["d/a.md", "d/sub/b.md"]
    assert set(left_out("d").values()) == {"symbolic link"}
    found = read("d", follow=True)
    at_last = ["d/sub/far/c.md", "d/sub/far/one.md"]
    # The folder's own names first, then what links add to it; nothing twice but by a file's link.
    assert found == ["d/a.md", "d/one.md", "d/sub/b.md", *at_last]
    assert set(left_out("d", follow=True)) == {"d/self", "d/sub/far/back"}
    assert unreadable("d", follow=True) == {"d/broken": "is a broken symbolic link"}
    documents = list(read_documents(find_files(["d"], choice=FileChoice(follow=True))))
    assert sum("text of far/one.md" in getattr(item, "text", "") for item in documents) == 2


def test_a_chain_of_links_between_many_folders_ends() -> None:
    for one in range(12):
        tree(f"t/{one}/a.md")
        for other in range(12):
            Path(f"t/{one}/to{other}").symlink_to(f"../{other}")
    assert len(read("t", follow=True)) == 12


# --- lists ----------------------------------------------------------------------------------


def test_files_of_a_list_come_before_those_of_paths_and_once() -> None:
    tree("a.md", "b.log", ".c.md", "d/e.md", "d/f.md", "g.md")
    rules(".gitignore", "*.log")
    listed = ["b.log", ".c.md", "d/e.md", "./d/e.md", "b.log"]
    assert read("d", "g.md", listed=listed) == ["b.log", ".c.md", "d/e.md", "d/f.md", "g.md"]
    assert read("b.log", listed=["d", "b.log"]) == ["d/e.md", "d/f.md", "b.log"]
    assert read("g.md", listed=listed, types=("md",)) == [".c.md", "d/e.md", "g.md"]
    assert read("g.md", listed=listed, globs=("!e.md",)) == ["b.log", ".c.md", "g.md"]
    assert read("g.md", listed=["b.log"], max_bytes=3) == ["g.md"]


def test_what_a_list_names_and_is_not_there_is_told() -> None:
    tree("a.md", "real.md")
    Path("link.md").symlink_to("real.md")
    found = list(find_files([], listed=["gone.md", "a.md", "x\0y", "a.md/z", "link.md", "real.md"]))
    told = [(short(i.source), i.reason) for i in found if isinstance(i, Unreadable)]
    assert [name for name, _ in told] == ["gone.md", "x\\x00y", "a.md/z"]
    assert told[0][1] == "no such file or directory"
    files = [i for i in found if isinstance(i, FoundFile)]
    assert [short(file.source) for file in files] == ["a.md", "link.md"]
    assert not any(file.named for file in files)
    assert all(hasattr(item, "text") for item in read_documents(files))


def test_lines_of_a_list() -> None:
    assert lines_of(b"a b\nc\r\n\nd", null=False) == ["a b", "c", "d"]
    assert lines_of(b"a\nb\0c\0", null=True) == ["a\nb", "c"]
    (odd,) = lines_of(b"caf\xe9\n", null=False)
    Path(odd).write_text("x")
    assert [short(i.source) for i in find_files([], listed=[odd])] == ["caf\\xe9"]


# --- a tree that cannot be read, or changes meanwhile ---------------------------------------


class _Failing:
    """A listing that breaks off after one entry."""

    def __init__(self, path: str) -> None:
        self._real = os.scandir(path)

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries()

    def __exit__(self, *error: object) -> None:
        self._real.close()

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        yield next(self._real)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_folders_that_cannot_be_listed_are_told_and_the_rest_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree("d/a.md", "d/gone/b.md", "d/locked/c.md", "d/torn/e.md", "d/z.md")
    scandir = os.scandir

    def failing(path: Any) -> Any:
        name = Path(path).name
        if name == "locked":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if name == "gone":
            Path("d/gone/b.md").unlink()
            Path("d/gone").rmdir()
        if name == "torn":
            with monkeypatch.context() as patch:
                patch.setattr(os, "scandir", scandir)
                return _Failing(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    found = list(find_files(["d"]))
    told = {short(i.source): i.reason for i in found if isinstance(i, Unreadable)}
    assert told == {
        "d/gone": "no such file or directory",
        "d/locked": "permission denied",
        "d/torn": "input/output error",
    }
    names = [short(i.source) for i in found if isinstance(i, FoundFile)]
    assert names == ["d/a.md", "d/torn/e.md", "d/z.md"]


def test_a_file_that_vanishes_while_its_folder_is_walked_is_told() -> None:
    tree("d/a.md", "d/b.md", "d/sub/c.md", "d/z.md")
    found = find_files(["d"])
    reading = read_documents(found)
    assert hasattr(next(reading), "text")
    Path("d/b.md").unlink()
    Path("d/sub/c.md").unlink()
    Path("d/sub").rmdir()
    rest = [(short(i.source), type(i).__name__) for i in reading]
    assert rest == [("d/b.md", "Unreadable"), ("d/sub", "Unreadable"), ("d/z.md", "Document")]


def test_a_large_tree_is_walked_step_by_step() -> None:
    """The full size, 100,000 files, with CACHEBLEND_STRESS=50."""
    folders, files = int(20 * STRESS), 100
    for folder in range(folders):
        Path(f"t/{folder:05}").mkdir(parents=True)
        for file in range(files):
            Path(f"t/{folder:05}/{file}.md").touch()
    rules("t/.gitignore", *(f"name{n}-*.tmp" for n in range(50)), "7?.md")
    found = find_files(["t"])
    assert isinstance(next(found), Skipped)  # the rules are read
    tracemalloc.start()
    assert sum(isinstance(item, FoundFile) for item in found) == folders * (files - 10)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000 + 500 * folders
    tracemalloc.stop()


def _fail_to_open(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    import builtins

    really = builtins.open

    def opening(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith(end):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really(path, *args, **options)

    monkeypatch.setattr(builtins, "open", opening)
