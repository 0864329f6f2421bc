"""HTML, Word and EPUB: main text as Markdown, and nothing of programs or menus."""

import io
import zipfile
from pathlib import Path

import pytest

from engine.documents import Unreadable
from tests.engine.documents import awkward
from tests.engine.documents.reading import at_marks, document, read


def test_a_web_page(tmp_path: Path) -> None:
    text = document(tmp_path, "a.html", awkward.HTML).text
    assert text.startswith(
        f"# Tides\n\n{awkward.WORDS.strip()}\n\n## Heights\n\n| Day | Height |\n"
    )
    assert "| Monday | 4.5 m |" in text
    assert "```sh\ntide --day monday\n```\n\n- ropes\n- lamps\n\nGröße" in text
    for word in ("secret", "color", "Menu entry", "Copyright", "base64", "<"):
        assert word not in text


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-8-sig", "cp1251", "shift_jis"])
def test_the_charset_a_page_names(tmp_path: Path, encoding: str) -> None:
    words = {"cp1251": "Прилив", "shift_jis": "夜警は毎晩"}.get(encoding, "Größe")
    raw = f'<html><meta charset="{encoding}"><p>{words}</p>'.encode(encoding)
    assert document(tmp_path, "a.html", raw).text == f"{words}\n"


def test_a_charset_that_does_not_exist(tmp_path: Path) -> None:
    for name in ("nonsense", "rot13", "base64", "unicode_escape", "utf-7"):
        raw = f'<html><meta charset="{name}"><p>Größe über</p>'.encode("latin-1")
        assert document(tmp_path, "a.html", raw).text == "Größe über\n"


def test_a_page_without_a_main_part(tmp_path: Path) -> None:
    links = "".join(f'<li><a href="/{n}">Menu entry {n}</a></li>' for n in range(9))
    raw = (
        f"<html><head><title>Boats</title></head><body><div><ul>{links}</ul></div>"
        f"<div><h2>Log</h2><p>{awkward.WORDS * 3}</p></div></body></html>"
    )
    text = document(tmp_path, "a.html", raw).text
    assert text.startswith("# Boats\n\n## Log\n\nThe harbour master")
    assert "Menu" not in text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("<html><body>bare words</body></html>", "bare words\n"),
        ("<html><body><nav>Only <a href=x>a menu</a></nav></body></html>", "Only a menu\n"),
        ("<p>A fragment</p><p>and more</p>", "A fragment\n\nand more\n"),
        ("<html><table><tr><td>a|b</td></tr></table>", "| a\\|b |\n| --- |\n"),
    ],
)
def test_strange_pages(tmp_path: Path, raw: str, text: str) -> None:
    found = document(tmp_path, "a.html", raw)
    assert found.text.replace("|  |\n| --- |\n| a", "| a") in (text, text.replace("| --- |\n", ""))


def test_a_page_nested_very_deep(tmp_path: Path) -> None:
    for depth in (100, 200, 3000, 100_000):
        raw = f"<html><style>no</style>{'<div>' * depth}deep{'</div>' * depth}<p>end</p>"
        assert document(tmp_path, "a.html", raw).text.split() == ["deep", "end"]


def test_a_page_with_a_huge_script_is_read(tmp_path: Path) -> None:
    raw = f"<html><script>{'x' * 10_100_000}</script><p>The tide is in.</p>"
    assert document(tmp_path, "a.html", raw).text == "The tide is in.\n"


def test_entities_that_a_page_declares_are_not_text(tmp_path: Path) -> None:
    declared = '<!ENTITY a "lol"><!ENTITY b SYSTEM "file:///etc/passwd">'
    raw = f"<!DOCTYPE html [{declared}]><html><p>Tide &b; in</p>"
    assert document(tmp_path, "a.html", raw).text == "Tide &b; in\n"


def test_a_page_that_programs_fill_is_told(tmp_path: Path) -> None:
    found = document(tmp_path, "a.html", "<html><body><script>run()</script></body></html>")
    assert (found.text, len(found.notes)) == ("", 1)


def test_a_word_document(tmp_path: Path) -> None:
    text = document(tmp_path, "a.docx", awkward.docx()).text
    words = awkward.WORDS.strip()
    assert text.startswith(f"# Tides\n\n{words}\n\n## Heights\n\n| Day | Height |\n| --- | --- |\n")
    assert "| Monday | 4.5 \\| 4.7 m |\n" in text
    assert text.endswith("\n- ropes\n- lamps\n")


def test_a_book_in_the_order_of_its_spine(tmp_path: Path) -> None:
    found = document(tmp_path, "a.epub", awkward.epub())
    assert (found.kind, found.form) == ("epub", "markdown")
    assert at_marks(found) == {
        ("chapter", 1): f"# Dawn\n\n{awkward.WORDS.strip()}",
        ("chapter", 2): "# T\n\nDusk falls.",
    }


def test_a_book_that_lost_a_chapter(tmp_path: Path) -> None:
    whole = zipfile.ZipFile(io.BytesIO(awkward.epub()))
    kept = {n: whole.read(n) for n in whole.namelist() if not n.endswith("two.xhtml")}
    found = document(tmp_path, "a.epub", awkward.archive(kept))
    assert at_marks(found) == {("chapter", 2): "# T\n\nDusk falls."}
    assert found.notes == ("1 of 2 chapters can't be read",)


def test_a_book_without_an_order_is_in_that_of_its_list(tmp_path: Path) -> None:
    whole = zipfile.ZipFile(io.BytesIO(awkward.epub()))
    files = {name: whole.read(name) for name in whole.namelist()}
    package = files["OEBPS/book.opf"].partition(b"<spine>")[0] + b"</package>"
    found = document(tmp_path, "a.epub", awkward.archive(files | {"OEBPS/book.opf": package}))
    assert list(at_marks(found)) == [("chapter", 1), ("chapter", 2)]


def test_a_chapter_that_is_named_many_times_is_read_once(tmp_path: Path) -> None:
    whole = zipfile.ZipFile(io.BytesIO(awkward.epub()))
    files = {name: whole.read(name) for name in whole.namelist()}
    package = files["OEBPS/book.opf"].replace(b"</spine>", b'<itemref idref="two.xhtml"/></spine>')
    found = document(tmp_path, "a.epub", awkward.archive(files | {"OEBPS/book.opf": package}))
    assert found.text == document(tmp_path, "a.epub", awkward.epub()).text


def test_a_book_of_pictures_is_told(tmp_path: Path) -> None:
    found = document(tmp_path, "a.epub", awkward.epub({"a.xhtml": "<img src='a.png'/>"}))
    assert (found.text, found.notes) == ("", ("no text in it",))


def test_a_book_with_encrypted_fonts_alone_is_read(tmp_path: Path) -> None:
    def encrypted(name: str) -> dict[str, str]:
        return {"META-INF/encryption.xml": f'<e><c><CipherReference URI="{name}"/></c></e>'}

    assert document(tmp_path, "a.epub", awkward.epub(extra=encrypted("OEBPS/font.otf"))).text
    found = read(tmp_path, "a.epub", awkward.epub(extra=encrypted("OEBPS/two.xhtml")))
    assert isinstance(found, Unreadable)
    assert "DRM" in found.reason


def test_paths_that_lead_out_of_a_book_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret.xhtml").write_text("<p>secret</p>")
    found = document(
        tmp_path, "a.epub", awkward.epub({"../../secret.xhtml": "", "b.xhtml": "<p>b</p>"})
    )
    assert "secret" not in found.text


@pytest.mark.parametrize("name", ["a.docx", "a.epub"])
def test_what_unpacks_to_too_much_is_refused(tmp_path: Path, name: str) -> None:
    part = {"a.docx": "word/document.xml", "a.epub": "OEBPS/two.xhtml"}[name]
    whole = zipfile.ZipFile(io.BytesIO(awkward.GOOD[name]()))
    files = {n: whole.read(n) for n in whole.namelist()} | {part: bytes(2**20)}
    raw = bytearray(awkward.archive(files))
    place = raw.rfind(part.encode()) - 46  # its entry in the archive's list, where sizes are
    raw[place + 24 : place + 28] = (2**30).to_bytes(4, "little")
    found = read(tmp_path, name, bytes(raw))
    assert isinstance(found, Unreadable)
    assert "unpacks to more" in found.reason
