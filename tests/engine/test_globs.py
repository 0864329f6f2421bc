"""Patterns of ignore files match what git says they match."""

from __future__ import annotations

import time

import pytest

from engine.documents.globs import Glob, Globs, braces


def matches(pattern: str, path: str, folder: bool = False) -> bool:
    return Globs.read([pattern]).match(path, path.rpartition("/")[2], folder) is not None


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.md", "a.md d/a.md d/e/.md", "a.mdx d/md"),
        ("a", "a d/a", "ab a/b d/ab"),
        ("/a", "a", "d/a"),
        ("d/a", "d/a", "x/d/a d/a/b"),
        ("**/a", "a d/a d/e/a", "d/ab"),
        ("d/**", "d/a d/e/a", "d x/d/a"),
        ("d/**/a", "d/a d/e/a d/e/f/a", "d/ea x/d/a"),
        ("/**", "a d/a", ""),
        ("d/*", "d/a d/.a", "d/e/a"),
        ("?.md", "a.md d/b.md", "ab.md .md"),
        ("[ab]c", "ac bc", "cc abc"),
        ("[!ab]c", "cc", "ac bc"),
        ("[^a-c]c", "dc", "ac bc cc"),
        ("[]a]", "] a", "b"),
        ("[[:digit:]]x", "1x d/9x", "ax"),
        ("[b-a]", "b", "a"),
        ("d/[/a]", "d/a", "d//"),
        (r"\*", "*", "a"),
        (r"\!a", "!a", "a"),
        (r"\#a", "#a", "a"),
        ("a  ", "a", "a\\  "),
        ("a\\ ", "a\\ ".replace("\\", ""), "a"),
        ("a**b", "ab axb", "a/b ax/b"),
        ("*a*b*", "ab xaxbx d/ab", "ba"),
    ],
)
def test_patterns(pattern: str, yes: str, no: str) -> None:
    split = (lambda text: [text]) if pattern == "a\\ " else str.split
    assert all(matches(pattern, path) for path in split(yes))
    assert not any(matches(pattern, path) for path in no.split())


def test_a_slash_at_the_end_is_of_folders_alone() -> None:
    assert matches("build/", "d/build", folder=True)
    assert not matches("build/", "d/build")
    assert matches("d/build/", "d/build", folder=True)
    assert not matches("d/build/", "x/d/build", folder=True)


@pytest.mark.parametrize("line", ["", "  ", "# note", "/", "a[", "a\\", "!", "[[:nothing:]]", "\r"])
def test_lines_that_are_no_pattern(line: str) -> None:
    assert Glob.read(line) is None


def test_the_last_pattern_that_matches_counts() -> None:
    globs = Globs.read(["*.md", "!keep.md", "/drafts/*", "!x/"])
    for path, kept in [("a.md", False), ("d/keep.md", True), ("drafts/keep.md", False)]:
        found = globs.match(path, path.rpartition("/")[2], False)
        assert found is not None
        assert found.keep is kept
    assert globs.match("x", "x", True).keep  # type: ignore[union-attr]
    assert globs.match("x", "x", False) is None


def test_a_hostile_pattern_takes_no_time() -> None:
    """Tried place by place, each star at every other's, this would take years."""
    name = "a" * 250
    globs = Globs.read(["*a" * 100 + "*b", "/**/" + "*a" * 50 + "c"])
    began = time.process_time()
    assert globs.match(name, name, False) is None
    assert time.process_time() - began < 10


@pytest.mark.parametrize("times", [20, 5000])
def test_braces_without_end(times: int) -> None:
    with pytest.raises(ValueError, match="1000"):
        braces("{a,b}" * times)


def test_braces() -> None:
    assert braces("*.{md,txt}") == ["*.md", "*.txt"]
    assert braces("{a,b}/{c,d{e,f}}") == ["a/c", "a/de", "a/df", "b/c", "b/de", "b/df"]
    assert braces("{a}") == ["{a}"]
    assert braces(r"\{a,b}") == [r"\{a,b}"]
    assert braces("a{,b}") == ["a", "ab"]
    assert braces("{a,b") == ["{a,b"]


def test_the_last_of_very_many_patterns_counts() -> None:
    globs = Globs.read([f"{'!' * (n % 2)}a{n % 700}*/**/b\n" for n in range(1500)])
    found = globs.match("a7x/y/b", "b", False)
    assert found is globs.globs[1407]
    assert globs.match("b7x/y/b", "b", False) is None
