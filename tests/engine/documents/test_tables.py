"""Rows stay whole, whatever is in their cells."""

from pathlib import Path

import pytest

from tests.engine.documents.reading import at_marks, document


def test_rows_are_numbered_as_a_spreadsheet_does(tmp_path: Path) -> None:
    found = document(tmp_path, "boats.csv", "name,year\r\nPetrel,1987\r\n\r\nGannet,1990\r\n")
    assert (found.kind, found.form) == ("csv", "rows")
    assert found.text == "name,year\nPetrel,1987\nGannet,1990\n"
    assert at_marks(found) == {
        ("row", 1): "name,year",
        ("row", 2): "Petrel,1987",
        ("row", 4): "Gannet,1990",
    }


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_are_told_from_the_rows(tmp_path: Path, name: str, delimiter: str) -> None:
    rows = [["id", "note", "price"], ["1", "one, or two", "1,5"], ["2", "a; b | c", "2,5"]]
    quoted = [[f'"{cell}"' if not cell.isalnum() else cell for cell in row] for row in rows]
    text = "\n".join(delimiter.join(row) for row in quoted) + "\n"
    found = document(tmp_path, name, text)
    assert found.form == "rows"
    assert found.text.splitlines()[0] == delimiter.join(rows[0])
    assert all(cell in found.text for row in rows for cell in row)


def test_a_line_break_in_a_cell_leaves_its_row_whole(tmp_path: Path) -> None:
    raw = 'id,note\n1,"first\nsecond ""quoted"", end"\n2,plain\n'
    found = document(tmp_path, "t.csv", raw)
    assert found.text == 'id,note\n1,"first second ""quoted"", end"\n2,plain\n'
    assert [mark.number for mark in found.marks] == [1, 2, 3]


def test_a_quote_that_nobody_closes_is_a_character(tmp_path: Path) -> None:
    raw = 'id,size\n1,"5\n' + "".join(f"{n},{n}\n" for n in range(2, 1000))
    found = document(tmp_path, "t.csv", raw)
    assert found.form == "rows"
    assert found.text == raw
    assert len(found.marks) == 1000


def test_a_delimiter_that_the_file_names(tmp_path: Path) -> None:
    assert document(tmp_path, "t.csv", "sep=;\na;b\n1;2\n").text == "a;b\n1;2\n"


@pytest.mark.parametrize(
    "raw",
    [
        "Dear all,\n\nthe boat leaves at six, or seven.\nBring ropes.\n\nYours, Orla\n",
        "one\ntwo\nthree\n",
        "a,b\n1\n2,3,4\n5,6,7,8\n9\n",
    ],
)
def test_what_is_no_table_is_text_and_told(tmp_path: Path, raw: str) -> None:
    found = document(tmp_path, "t.csv", raw)
    assert (found.kind, found.form, found.text, found.marks) == ("csv", "text", raw, ())
    assert "read as text" in found.notes[0]


def test_short_rows_and_blank_cells_are_kept(tmp_path: Path) -> None:
    raw = "a,b,c\n1,2,3\n4,5,6\n7,,\n8,9,10\n11\n12,13,14\n15,16,17\n"
    assert document(tmp_path, "t.csv", raw).text == raw


def test_an_empty_table(tmp_path: Path) -> None:
    found = document(tmp_path, "t.csv", "")
    assert (found.text, found.notes) == ("", ())
