"""What counts as a change of the files of a folder, and that the system tells of it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.documents import FoundFile, find_files, watching
from engine.documents.watching import Changes, Known, Watch


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watching, "REPLACED_SECONDS", 0.05)
    Path("d/sub").mkdir(parents=True)
    for name in ("a.md", "b.md", "sub/c.md"):
        Path("d", name).write_text("text")


def known() -> Known:
    found = Known()
    assert len(list(found.note(find_files(["d"])))) == 3
    return found


def names(changes: Changes) -> tuple[list[str], list[str]]:
    found = [Path(item.source).name for item in changes.found]
    return found, [Path(source).name for source in changes.gone]


def test_changed_new_and_removed_files() -> None:
    files = known()
    assert not files.changes(find_files(["d"])).any
    Path("d/a.md").write_text("longer text")
    Path("d/new.md").write_text("text")
    Path("d/sub/c.md").unlink()
    assert names(files.changes(find_files(["d"]))) == (["a.md", "new.md"], ["c.md"])
    assert not files.changes(find_files(["d"])).any
    os.utime("d/a.md", ns=(1, 1))
    assert names(files.changes(find_files(["d"]))) == (["a.md"], [])


def test_a_save_by_rename_is_a_change() -> None:
    files = known()
    Path("d/a.md.tmp").write_text("text")
    Path("d/a.md.tmp").rename("d/a.md")
    assert names(files.changes(find_files(["d"]))) == (["a.md"], [])


def test_a_file_that_is_away_for_a_moment_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    files = known()
    Path("d/a.md").unlink()

    def saved(seconds: float) -> None:
        Path("d/a.md").write_text("saved")

    monkeypatch.setattr(time, "sleep", saved)
    assert names(files.changes(find_files(["d"]))) == (["a.md"], [])
    monkeypatch.undo()
    Path("d/a.md").unlink(missing_ok=True)


def test_rules_that_change_take_files_out_and_bring_them_back() -> None:
    files = known()
    Path("d/.gitignore").write_text("sub/\n")
    changes = files.changes(find_files(["d"]))
    assert names(changes) == ([".gitignore", "sub"], ["c.md"])  # told once, as left out
    assert names(files.changes(find_files(["d"]))) == ([], [])
    Path("d/.gitignore").unlink()
    assert names(files.changes(find_files(["d"]))) == (["c.md"], [])


def test_what_lay_in_a_folder_that_is_away_stays() -> None:
    files = known()
    watch = Watch([Path("d")], hidden=False)
    assert watch.lost() == []
    Path("d").rename("elsewhere")
    assert watch.lost() == [Path.cwd() / "d"]
    assert not files.changes([], watch.lost()).any
    Path("elsewhere").rename("d")
    Path("d/a.md").unlink()
    assert names(files.changes(find_files(["d"]), watch.lost())) == ([], ["a.md"])


def test_changes_that_nothing_came_of_come_again() -> None:
    files = known()
    Path("d/a.md").write_text("other text")
    Path("d/b.md").unlink()
    changes = files.changes(find_files(["d"]))
    files.forget(changes)
    assert names(files.changes(find_files(["d"]))) == (["a.md"], ["b.md"])


def after(seconds: float, act: Callable[[], object]) -> None:
    threading.Timer(seconds, act).start()


def test_the_system_tells_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "QUIET_MS", 50)
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.2)
    Path("typed.md").write_text("text")
    with Watch([Path("d"), Path("typed.md")], hidden=False) as watch:
        time.sleep(0.3)
        Path("d/.hidden").write_text("x")
        assert not watch.wait(0.5)
        after(0.1, lambda: Path("d/sub/new.md").write_text("text"))
        assert watch.wait(20)
        after(0.1, lambda: Path("d/.gitignore").write_text("x"))
        assert watch.wait(20)
        after(0.1, lambda: Path("typed.md").write_text("longer text"))
        assert watch.wait(20)
        while watch.wait(0.3):
            pass
        Path("d").rename("old")  # a folder that is made anew is watched as the old one was
        Path("d").mkdir()
        assert watch.wait(20)
        time.sleep(0.3)
        while watch.wait(0.3):
            pass
        after(0.1, lambda: Path("d/later.md").write_text("text"))
        assert watch.wait(20)
    assert [item.path for item in find_files(["d"]) if isinstance(item, FoundFile)]
