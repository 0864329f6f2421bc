"""Files that are replaced whole or not at all, and what is read from them."""

from pathlib import Path

import pytest

from engine.files import replace_file
from engine.numbers import is_number


@pytest.mark.parametrize("synced", [False, True])
def test_a_file_is_replaced_whole(tmp_path: Path, synced: bool) -> None:
    file = tmp_path / "new" / "facts.json"
    for text in ("é long text", "short"):
        replace_file(file, text, synced=synced)
        assert file.read_text("utf-8") == text
    assert [path.name for path in file.parent.iterdir()] == ["facts.json"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    replace_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\ud800 of a surrogate")
    with pytest.raises(OSError, match=r"facts\.json"):
        replace_file(file / "below", "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["facts.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(tmp_path / "folder", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "folder"]


def test_a_number_is_finite_and_no_truth_value() -> None:
    assert all(map(is_number, (0, -1, 2.5)))
    assert not any(map(is_number, (True, None, "1", [1], float("nan"), float("inf"))))
