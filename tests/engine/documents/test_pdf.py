"""Pages in reading order: paragraphs whole, columns apart, running titles once."""

from pathlib import Path

import pytest

from engine.documents.page_layout import Page, Run, lines_of
from engine.documents.running_titles import without_running_titles
from tests.engine.documents.awkward import columns, form, pdf, scan, turned
from tests.engine.documents.reading import at_marks, document

LONG = "The harbour master keeps the log of every boat that passes the lighthouse, and"


def test_lines_become_paragraphs_and_large_ones_headings(tmp_path: Path) -> None:
    page = f"# Tides\n{LONG}\nwrites down the tide.\n\n# Height\n{LONG}\nwrites on."
    found = document(tmp_path, "a.pdf", pdf(page))
    assert (found.kind, found.form) == ("pdf", "markdown")
    assert (
        found.text == f"# Tides\n\n{LONG} writes down the tide.\n\n# Height\n\n{LONG} writes on.\n"
    )


def test_pages_are_marked_and_a_sentence_goes_on_over_them(tmp_path: Path) -> None:
    found = document(
        tmp_path, "a.pdf", pdf(f"First.\n\n{LONG}", "writes down the tide.", "", "End.")
    )
    assert found.text == f"First.\n\n{LONG} writes down the tide.\n\nEnd.\n"
    assert found.form == "text"
    assert at_marks(found) == {
        ("page", 1): f"First.\n\n{LONG}",
        ("page", 2): "writes down the tide.",
        ("page", 4): "End.",
    }
    assert found.notes == ()


def test_words_parted_at_a_lines_end(tmp_path: Path) -> None:
    lines = [
        "A well-known light-",
        "house stands there. Another well-",
        "known one is an anti-",
        "Roman tower, seen from a light",
        "boat.",
    ]
    text = document(tmp_path, "a.pdf", pdf("\n".join(lines))).text
    assert text == (
        "A well-known lighthouse stands there. Another well-known one is an anti-Roman tower, "
        "seen from a light boat.\n"
    )


def test_two_columns_written_across(tmp_path: Path) -> None:
    left = [f"left line {n} keeps the log of boats" for n in range(20)]
    right = [f"right line {n} writes down the tides" for n in range(20)]
    heading = "A heading that goes across both of the columns of this page, quite wide indeed"
    found = document(tmp_path, "a.pdf", columns(left, right, heading))
    words = found.text.split()
    numbers = [words[place + 2] for place, word in enumerate(words) if word in ("left", "right")]
    assert numbers == [str(n) for n in range(20)] * 2
    assert found.text.startswith(heading)
    assert words.index("right") > len(words) // 2


def test_a_table_stays_row_by_row(tmp_path: Path) -> None:
    found = document(tmp_path, "a.pdf", columns(["Day", "Monday"] * 6, ["Height", "4.5 m"] * 6))
    assert found.text == "Day   Height\nMonday   4.5 m\n" * 6


def test_running_titles_and_page_numbers_are_told_from_text(tmp_path: Path) -> None:
    pages = [
        f"Page text {name}.\n\n\n\nHarbour report" for name in "one two three four five".split()
    ]
    text = document(tmp_path, "a.pdf", pdf(*pages, head="Harbour report 2024")).text
    assert text.count("Harbour report 2024") == 1
    assert "of 5" not in text
    assert text.count("Harbour report\n") == 5
    assert all(page.split("\n")[0] in text for page in pages)


def test_the_same_line_inside_pages_is_no_running_title() -> None:
    runs = [Run("Chapter", 60, 100, 800, 11), Run("Again and again", 60, 120, 400, 11)]
    pages = [Page(n, 842, 0, lines_of(runs)) for n in range(1, 7)]
    kept = without_running_titles(pages)
    assert [len(page.lines) for page in kept] == [2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("size", "first", "kept"),
    [
        (18, "Chapter {n}: The pump model P{n}", 5),  # a heading
        (11, "Chapter {n}: The pump model P{n}", 5),
        (18, "The pump", 5),
        (11, "Section {n}", 5),
        (11, "{n}.12.2024", 5),
        (11, "{n}/3", 5),
        (11, "The pump", 1),
        (8, "2024", 1),
        (8, "The pump | {n}", 1),
        (8, "- {n} -", 0),
        (8, "Page {n} of 5", 0),
        (8, "{n} / 5", 0),
    ],
)
def test_only_what_is_surely_no_text_is_taken_off_a_page(size: int, first: str, kept: int) -> None:
    pages = []
    for n in range(1, 6):
        head = first.format(n=n)
        runs = [Run(head, 60, 60 + 5 * len(head), 800, size)]
        runs += [Run(f"{LONG} {n} {line}", 60, 500, 760 - 14 * line, 11) for line in range(9)]
        pages.append(Page(n, 842, 0, lines_of(runs)))
    left = [len(page.lines) - 9 for page in without_running_titles(pages)]
    assert left == [int(n < kept) for n in range(5)]


def test_a_title_behind_text_is_kept() -> None:
    """What stands below other text at a page's top may be a heading."""
    runs = [Run("The pump", 60, 100, 780, 11)]
    pages = []
    for n in range(1, 6):
        above = [Run(f"{LONG} {n}", 60, 500, 800, 11)]
        pages.append(Page(n, 842, 0, lines_of([*above, *runs])))
    assert [len(page.lines) for page in without_running_titles(pages)] == [2] * 5


def test_two_pages_have_no_running_titles(tmp_path: Path) -> None:
    text = document(tmp_path, "a.pdf", pdf("One.", "Two.", head="Report")).text
    assert text.count("Report") == 2


@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_a_page_whose_text_is_turned(tmp_path: Path, turn: int) -> None:
    text = document(tmp_path, "a.pdf", turned(turn, [LONG, "writes on.", "", "A new one."])).text
    assert text == f"{LONG} writes on.\n\nA new one.\n"


def test_what_is_filled_into_a_form_is_text(tmp_path: Path) -> None:
    raw = form("Name of the boat", "Petrel of Skye")
    text = document(tmp_path, "a.pdf", raw).text
    assert text.split() == "Name of the boat Petrel of Skye".split()


def test_a_table_of_contents_is_no_row_of_dots(tmp_path: Path) -> None:
    page = f"Tides . . . . . . . . . . . . 7\n# Height . . . . . . . 12\nDepth ........ 30\n{LONG}"
    text = document(tmp_path, "a.pdf", pdf(f"{page}\n{LONG}\n{LONG}")).text
    assert text.startswith("Tides … 7\n")
    assert "\nHeight … 12\n" in text
    assert "\nDepth … 30\n" in text


def test_lines_of_a_program_stay_lines(tmp_path: Path) -> None:
    lines = ["def tide(day):", "    if day:", "        return 4.5", "    return None"]
    text = document(tmp_path, "a.pdf", turned(0, lines, font="Courier")).text
    assert text == "\n".join(lines) + "\n"


def test_a_lock_on_changes_alone_does_not_hinder_reading(tmp_path: Path) -> None:
    raw = turned(0, ["Read me."], owner="secret")
    assert document(tmp_path, "a.pdf", raw).text == "Read me.\n"


def test_pages_without_text_are_told(tmp_path: Path) -> None:
    found = document(tmp_path, "a.pdf", scan(3, text_on=2))
    assert found.notes == ("2 of 3 pages have no text",)
    assert [mark.number for mark in found.marks] == [2]


@pytest.mark.parametrize("text", ["# not a heading", "```", "---"])
def test_what_looks_like_markdown_is_text(tmp_path: Path, text: str) -> None:
    found = document(tmp_path, "a.pdf", pdf(f"# Real\n{LONG}\n\n\n {text}\n\n\n{LONG}"))
    assert found.form == "markdown"
    assert f"\n{text}" not in found.text.removeprefix("# Real")
    assert text.removeprefix("# ") in found.text
