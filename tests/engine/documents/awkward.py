"""Files of every kind that is read, and of every way they go wrong; made, not kept."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping

WORDS = (
    "The harbour master keeps the log of every boat that passes the lighthouse, and writes down "
    "the state of the tide. The pilot boat leaves at six. "
)
PAGE_HEIGHT = 842


def pdf(*pages: str, password: str = "", head: str = "", size: int = 11) -> bytes:
    """A page for each text; lines longer than a page is wide are broken by hand."""
    from reportlab.lib.pdfencrypt import StandardEncryption
    from reportlab.pdfgen.canvas import Canvas

    out = io.BytesIO()
    locked = StandardEncryption(password, canPrint=0) if password else None
    canvas = Canvas(out, pagesize=(595, PAGE_HEIGHT), encrypt=locked, invariant=True)
    for number, page in enumerate(pages, 1):
        if head:
            canvas.setFont("Helvetica", 8)
            canvas.drawString(60, PAGE_HEIGHT - 30, head)
            canvas.drawString(290, 25, f"Page {number} of {len(pages)}")
        y = PAGE_HEIGHT - 80.0
        for line in page.split("\n"):
            large = line.startswith("# ")
            canvas.setFont("Helvetica-Bold" if large else "Helvetica", 18 if large else size)
            canvas.drawString(60, y, line.removeprefix("# "))
            y -= 2 * size if large else 1.3 * size
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def turned(turn: int, lines: list[str], *, font: str = "Helvetica", owner: str = "") -> bytes:
    """A page with its text turned to the left, and `owner` what allows changing it."""
    from reportlab.lib.pdfencrypt import StandardEncryption
    from reportlab.pdfgen.canvas import Canvas

    out = io.BytesIO()
    locked = StandardEncryption("", ownerPassword=owner) if owner else None
    canvas = Canvas(out, pagesize=(842, PAGE_HEIGHT), encrypt=locked, invariant=True)
    canvas.translate(421, 421)
    canvas.rotate(turn)
    for number, line in enumerate(lines):
        canvas.setFont(font, 11)
        set_in = len(line) - len(line.lstrip())
        canvas.drawString(-350 + 6.6 * set_in, 300 - 14 * number, line.lstrip())
    canvas.save()
    return out.getvalue()


def columns(left: list[str], right: list[str], heading: str = "") -> bytes:
    """A page in two columns, written line by line across both."""
    from reportlab.pdfgen.canvas import Canvas

    out = io.BytesIO()
    canvas = Canvas(out, pagesize=(595, PAGE_HEIGHT), invariant=True)
    canvas.setFont("Helvetica", 9)
    if heading:
        canvas.drawString(50, 800, heading)
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        canvas.drawString(50, 780 - 12 * number, a)
        canvas.drawString(310, 780 - 12 * number, b)
    canvas.save()
    return out.getvalue()


def form(label: str, value: str) -> bytes:
    """A page with a field to fill in."""
    from reportlab.pdfgen.canvas import Canvas

    out = io.BytesIO()
    canvas = Canvas(out, invariant=True)
    canvas.drawString(60, 700, label)
    canvas.acroForm.textfield(name="field", value=value, x=60, y=660, width=300)
    canvas.save()
    return out.getvalue()


def scan(pages: int = 2, text_on: int = 0) -> bytes:
    """Pages with a drawing alone; `text_on`: the page that has text too."""
    from reportlab.pdfgen.canvas import Canvas

    out = io.BytesIO()
    canvas = Canvas(out, invariant=True)
    for number in range(1, pages + 1):
        canvas.rect(10, 10, 200, 300, fill=1)
        if number == text_on:
            canvas.drawString(60, 700, "Only this page has words.")
        canvas.showPage()
    canvas.save()
    return out.getvalue()


def no_pages() -> bytes:
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[]/Count 0>>"]
    body, places = b"%PDF-1.4\n", []
    for number, item in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, item)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = b"trailer<</Size 3/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % len(body)
    return body + b"xref\n0 3\n0000000000 65535 f \n" + table + trailer


def docx() -> bytes:
    import docx as word

    made = word.Document()
    made.add_heading("Tides", 1)
    made.add_paragraph(WORDS)
    made.add_heading("Heights", 2)
    table = made.add_table(rows=0, cols=2)
    for row in (("Day", "Height"), ("Monday", "4.5 | 4.7 m")):
        for cell, text in zip(table.add_row().cells, row, strict=True):
            cell.text = text
    for item in ("ropes", "lamps"):
        made.add_paragraph(item, style="List Bullet")
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


HTML = f"""<!DOCTYPE html>
<html><head><meta charset="utf-8"><title>Tides &amp; boats</title><style>p {{color: red}}</style>
<script>var secret = "never shown";</script></head><body>
<nav><ul><li><a href="/">Home</a></li><li><a href="/menu">Menu entry</a></li></ul></nav>
<main><h1><a href="#t">¶</a>Tides</h1><p>{WORDS}</p><h2>Heights</h2>
<table><tr><th>Day</th><th>Height</th></tr><tr><td>Monday</td><td>4.5 m</td></tr></table>
<pre><code class="language-sh">tide --day monday</code></pre><ul><li>ropes</li><li>lamps</li></ul>
<p>Größe <img src="data:image/png;base64,AAAA" alt=""></p></main>
<footer>Copyright of the harbour</footer></body></html>
"""

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)


def epub(
    chapters: Mapping[str, str] | None = None, extra: Mapping[str, str] | None = None
) -> bytes:
    """A book whose spine is in the order given; `extra`: files beside its own."""
    if chapters is None:
        chapters = {"two.xhtml": f"<h1>Dawn</h1><p>{WORDS}</p>", "one.xhtml": "<p>Dusk falls.</p>"}
    items = "".join(
        f'<item id="{n}" href="{n}" media-type="application/xhtml+xml"/>' for n in chapters
    )
    spine = "".join(f'<itemref idref="{n}"/>' for n in chapters)
    opf = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
        f'{items}<item id="nav" href="nav.xhtml" properties="nav"/></manifest>'
        f'<spine><itemref idref="nav"/>{spine}</spine></package>'
    )
    page = (
        '<?xml version="1.0" encoding="utf-8"?>'
        "<html><head><title>T</title></head><body>{}</body></html>"
    )
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": CONTAINER}
    files |= {"OEBPS/book.opf": opf, "OEBPS/nav.xhtml": page.format("<ol><li>Contents</li></ol>")}
    files |= {f"OEBPS/{name}": page.format(body) for name, body in chapters.items()}
    return archive(files | dict(extra or {}))


def archive(files: Mapping[str, str | bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, text in files.items():
            made.writestr(name, text)
    return out.getvalue()


def office_file(stream: str) -> bytes:
    """The beginning of a compound file that has a stream of this name."""
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504) + stream.encode("utf-16-le") + bytes(99)


NOTEBOOK = {
    "nbformat": 4,
    "metadata": {"kernelspec": {"language": "python"}},
    "cells": [
        {"cell_type": "markdown", "source": ["# Tides\n", WORDS]},
        {"cell_type": "code", "source": "1 + 1", "outputs": [{"data": {"text/plain": "2"}}]},
    ],
}
RECORDS = [{"boat": "Petrel", "log": WORDS}, {"boat": "Gannet", "log": "calm"}]

GOOD: dict[str, Callable[[], bytes]] = {
    "a.txt": WORDS.encode,
    "a.md": lambda: f"---\ntitle: Tides\n---\n# Tides\n\n{WORDS}\n".encode(),
    "a.html": HTML.encode,
    "a.pdf": lambda: pdf("# Tides\nThe tide turns.", "It is high at six."),
    "a.docx": docx,
    "a.epub": epub,
    "a.csv": lambda: f'boat,log\nPetrel,"{WORDS}"\nGannet,calm\n'.encode(),
    "a.tsv": lambda: b"boat\tlog\nPetrel\tcalm\n",
    "a.json": lambda: json.dumps(RECORDS).encode(),
    "a.jsonl": lambda: "".join(json.dumps(record) + "\n" for record in RECORDS).encode(),
    "a.ipynb": lambda: json.dumps(NOTEBOOK).encode(),
    "a.py": lambda: b"def tide():\n    return 'high'\n",
    "utf-16.txt": lambda: WORDS.encode("utf-16"),
    "utf-32.txt": lambda: WORDS.encode("utf-32-be"),
    "latin.txt": lambda: "Größe über café naïve\n".encode("latin-1"),
}
"""By its name, a file of each format: all are documents."""

WRONG_NAME: dict[str, Callable[[], bytes]] = {
    "pdf.docx": GOOD["a.pdf"],
    "docx.pdf": docx,
    "epub.zip": epub,
    "html.txt": HTML.encode,
    "notebook.json": GOOD["a.ipynb"],
    "text.pdf": WORDS.encode,
    "text.docx": WORDS.encode,
    "text.csv": WORDS.encode,
    "text.json": WORDS.encode,
    "text.ipynb": WORDS.encode,
    "text.html": WORDS.encode,
}
"""Documents too, whatever their names say."""

EMPTY = {f"empty.{suffix}": b"" for suffix in "txt md html pdf docx epub csv json ipynb".split()}
BLANK = {f"blank.{suffix}": b" \r\n\t\n" for suffix in "txt md html csv json jsonl ipynb".split()}

UNREADABLE: dict[str, tuple[Callable[[], bytes], str]] = {
    "password.pdf": (lambda: pdf("secret", password="x"), "encrypted"),
    "scan.pdf": (scan, "OCR"),
    "no-pages.pdf": (no_pages, "without pages"),
    "broken.pdf": (lambda: b"%PDF-1.7\n" + bytes(range(256)) * 20, "damaged"),
    "garbage.pdf": (lambda: bytes(range(256)) * 20, "damaged"),
    "password.docx": (lambda: office_file("EncryptedPackage"), "encrypted"),
    "broken.docx": (lambda: docx()[:2000], "damaged"),
    "empty-archive.docx": (lambda: archive({"a": "b"}), "damaged"),
    "drm.epub": (lambda: epub(extra={"META-INF/rights.xml": "<r/>"}), "DRM"),
    "lost.epub": (lambda: archive({"META-INF/container.xml": CONTAINER}), "lacks"),
    "unordered.epub": (lambda: epub({}), "where its chapters are"),
    "broken.epub": (lambda: epub()[:900], "damaged"),
}
"""With what is said of them, in folders too."""

SKIPPED: dict[str, tuple[Callable[[], bytes], str]] = {
    "photo.jpg": (lambda: b"\xff\xd8\xff\xe0" + bytes(99), "image"),
    "drawing.svg": (lambda: b"<svg></svg>", "image"),
    "pack.zip": (lambda: archive({"a.txt": "text"}), "archive"),
    "pack.tar.gz": (lambda: b"\x1f\x8b\x08" + bytes(99), "archive"),
    "book.xlsx": (
        lambda: archive({"[Content_Types].xml": "", "xl/workbook.xml": ""}),
        "spreadsheet",
    ),
    "talk.pptx": (lambda: archive({"[Content_Types].xml": "", "ppt/a.xml": ""}), "slides"),
    "text.odt": (
        lambda: archive({"mimetype": "application/vnd.oasis.opendocument.text"}),
        "OpenDocument text",
    ),
    "old.doc": (lambda: office_file("WordDocument"), "old Word document"),
    "letter.rtf": (lambda: b"{\\rtf1 Dear all}", "RTF document"),
    "song.mp3": (lambda: b"ID3\x04" + bytes(99), "audio"),
    "film.mp4": (lambda: b"\0\0\0\x18ftypmp42" + bytes(99), "video"),
    "data.bin": (lambda: bytes(range(256)), "binary"),
}
"""Left out of folders, with the reason they are counted under."""
