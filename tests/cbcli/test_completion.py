"""Completion of values, as the shells ask for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_store.catalog import ChunkText
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from tests.cbcli.terminal import run

TEXTS = {
    "notes/plan.md": 'Ship \\$(touch owned) `id` "in" May.',
    "notes/two words.md": "Rest.",
    "ideas.txt": "Fish: and 'chips'",
}
IDS = sorted(chunk_id(text) for text in TEXTS.values())
PLAN = chunk_id(TEXTS["notes/plan.md"])

Offers = Callable[[str], list[str]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    for name in ("tiny", "tiny-2"):
        (tmp_path / "home" / "models" / name).mkdir(parents=True)
    (tmp_path / "cacheblend.toml").write_text("[profile.fast]\nratio = 0\n[profile.far]\n")
    with ChunkStore.open(tmp_path / "home" / "store", limit_bytes=2**26) as store:
        for source, text in TEXTS.items():
            chunks = [ChunkText(chunk_id(text), text, 0, len(text), 3)]
            name = str(tmp_path / source) if source.startswith("notes") else source
            store.catalog.replace_document(name, "d", "{}", chunks, collections=["work"])
        store.catalog.collect("old/work", ["ideas.txt"])
    return tmp_path


def bash(line: str) -> list[str]:
    words = f"cacheblend {line}"
    env = {
        "_CACHEBLEND_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = run(env=env)
    assert done.stderr == ""
    return done.stdout.split()


def zsh(line: str) -> str:
    env = {"_CACHEBLEND_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"cacheblend {line}"}
    done = run(env=env)
    assert done.stderr == ""
    return done.stdout


def fish(line: str) -> list[str]:
    env = {
        "_CACHEBLEND_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": f"cacheblend {line}",
    }
    done = run(env=env)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("st", ["store"]),
        ("ask --mod", ["--mode", "--model"]),
        ("ask --mode ", ["blend", "reuse", "full", "prefix"]),
        ("ask --policy ke", ["key", "key+value"]),
        ("ask --loader s", ["sync"]),
        ("ask --order s", ["score", "source", "shuffle"]),
        ("ask --retriever h", ["hybrid"]),
        ("ask --model ", ["tiny", "tiny-2"]),
        ("models show tiny-", ["tiny-2"]),
        ("ask --profile fa", ["fast", "far"]),
        ("config show --profile fas", ["fast"]),
        ("ask --collection ", ["old/work", "work"]),
        ("ingest --collection w", ["work"]),
        ("store rm --collection o", ["old/work"]),
        ("store collections rm w", ["work"]),
        ("ask --chunk ", [name[:12] for name in IDS]),
        (f"ask --chunk {PLAN[:20]}", [PLAN[:20]]),
        (f"store show {PLAN[:5]}", [PLAN[:12]]),
        (f"store rm {PLAN[:5]}", [PLAN[:12]]),
        ("ask --chunk xyz", []),
        ("store pin i", ["ideas.txt"]),
        ("store pin notes/", ["notes/plan.md"]),
        ("store export --document no", ["notes/plan.md"]),
        ("store collections add work ideas.txt not", ["notes/plan.md"]),
        ("ingest --type note", ["notebook"]),
        ("ingest --type-not note", ["notebook"]),
        ("inspect h", ["home/"]),
    ],
)
def test_bash_offers(line: str, offered: list[str], home: Path) -> None:
    assert bash(line) == offered


def test_a_store_named_on_the_line_is_the_one_that_is_looked_into(home: Path) -> None:
    (home / "home" / "store").rename(home / "elsewhere")
    assert bash("ask --collection ") == []
    assert bash("ask --store elsewhere --collection w") == ["work"]
    assert bash("store pin --store elsewhere id") == ["ideas.txt"]


def test_texts_are_told_beside_ids_without_anything_that_a_shell_would_read(home: Path) -> None:
    told = dict(line.split("\t") for line in fish("ask --chunk "))
    assert told[PLAN[:12]] == "Ship touch owned id in May."
    offered = zsh("ask --chunk ")
    assert offered.startswith("_arguments '*: :((\"")
    assert f'"{PLAN[:12]}":"Ship' in offered
    assert not set(offered.split("((")[1].split("))")[0]) & set("$`\\'()&;|<>")


def test_traces_are_found_in_folders(home: Path) -> None:
    (home / "runs").mkdir()
    (home / "runs" / "a.cbtrace").touch()
    (home / "runs" / "b.txt").touch()
    (home / "c.cbtrace").touch()
    assert bash("inspect ") == ["c.cbtrace", "home/", "runs/"]
    assert bash("inspect runs/") == ["runs/a.cbtrace"]


def test_where_something_is_wrong_nothing_is_offered_and_nothing_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CACHEBLEND_HOME", str(tmp_path / "home"))
    lines = ["ask --chunk ", "ask --model ", "store pin ", "ask --collection ", "ask --profile "]
    for line in lines:
        assert bash(line) == []
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "cacheblend.toml").write_text("this is = = no toml")
    (tmp_path / "home" / "store").mkdir(parents=True)
    (tmp_path / "home" / "store" / "catalog.db").write_bytes(b"x" * 5000)
    for line in lines:
        assert bash(line) == []
    assert zsh("ask --chunk ") == "_files\n"


def test_nothing_heavy_is_imported_for_it(home: Path) -> None:
    code = (
        "import os, sys\nfrom cbcli.main import app\n"
        "try: app([])\nexcept SystemExit: pass\n"
        "heavy = 'torch', 'tokenizers', 'transformers', 'bm25s', 'rich', 'textual'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    line = "cacheblend ask --chunk "
    env = {"_CACHEBLEND_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"}
    env |= {"CACHEBLEND_HOME": str(home / "home"), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    *offered, heavy = done.stdout.splitlines()
    assert (len(offered), heavy) == (3, "[]")
