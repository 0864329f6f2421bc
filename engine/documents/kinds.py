"""What a file is: told by what is in it first, by its name where that leaves it open.

`KINDS` are the kinds that documents have; each has its reader in `engine.documents.formats`.
"""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass

from engine.documents.languages import language_of
from engine.documents.names import suffix_of

_SUFFIXES = {
    "markdown": "md markdown mdown mkd mkdn mdx qmd rmd",
    "html": "html htm xhtml",
    "pdf": "pdf",
    "docx": "docx docm dotx",
    "epub": "epub",
    "csv": "csv tsv tab",
    "json": "json geojson webmanifest",
    "jsonl": "jsonl ndjson jsonlines",
    "notebook": "ipynb",
    "text": "txt text rst adoc asciidoc org log tex textile wiki srt vtt",
}
KIND_OF_SUFFIX = {
    suffix: kind for kind, suffixes in _SUFFIXES.items() for suffix in suffixes.split()
}
KINDS = (*_SUFFIXES, "code")
BINARY_KINDS = ("pdf", "docx", "epub")
CONVERTED_KINDS = (*BINARY_KINDS, "html")
"""Those that take long to read, and libraries in C that a damaged file may bring down."""

# Where pages are made of by a program: what looks like HTML in them is not yet.
_TEMPLATES = {"php", "erb", "ejs", "hbs", "j2", "jinja", "jinja2", "vue", "svelte", "jsp", "tmpl"}
_PAGE = re.compile(
    r"\s*(?:<\?xml[^>]{0,200}\?>\s*)?(?:<!--.{0,2000}?-->\s*){0,5}<(?:!doctype\s+html|html)[\s>]",
    re.I | re.S,
)
_CELLS = re.compile(r'"(?:cells|worksheets)"\s*:\s*\[')
_TAG = re.compile(r"<(?:/?[a-z][a-z0-9]*[\s/>]|!--)", re.I)


@dataclass(frozen=True)
class Foreign:
    """A file of a kind that is not read. name: what it is, with its article; advice: what one who
    wants it read can do; is_document: it is a document all the same, and that it can't be read is
    told wherever it lies."""

    name: str
    advice: str = ""
    is_document: bool = False

    @property
    def what(self) -> str:
        """In a word or two, for counting."""
        return self.name.removeprefix("an ").removeprefix("a ")

    @property
    def reason(self) -> str:
        return f"is {self.name}; {self.advice}" if self.advice else f"is {self.name}, not text"


ARCHIVE = Foreign("an archive", "unpack it and ingest the folder")
_IMAGE = Foreign("an image", "text in images is not read")
_AUDIO = Foreign("audio", "write down what is said in it first")
_VIDEO = Foreign("video", "write down what is said in it first")
_PROGRAM = Foreign("binary")
_MAGIC: tuple[tuple[int, bytes, Foreign], ...] = (
    (0, b"\x89PNG\r\n", _IMAGE),
    (0, b"\xff\xd8\xff", _IMAGE),
    (0, b"GIF87a", _IMAGE),
    (0, b"GIF89a", _IMAGE),
    (0, b"II*\0", _IMAGE),
    (0, b"MM\0*", _IMAGE),
    (0, b"\0\0\1\0", _IMAGE),
    (0, b"8BPS", _IMAGE),
    (8, b"WEBP", _IMAGE),
    (8, b"WAVE", _AUDIO),
    (8, b"AVI ", _VIDEO),
    (0, b"ID3", _AUDIO),
    (0, b"fLaC\0", _AUDIO),
    (0, b"OggS\0", _AUDIO),
    (4, b"ftypheic", _IMAGE),
    (4, b"ftypavif", _IMAGE),
    (4, b"ftypM4A", _AUDIO),
    (4, b"ftyp", _VIDEO),
    (0, b"\x1aE\xdf\xa3", _VIDEO),
    (0, b"\x1f\x8b", ARCHIVE),
    (0, b"BZh", ARCHIVE),
    (0, b"\xfd7zXZ\0", ARCHIVE),
    (0, b"7z\xbc\xaf'\x1c", ARCHIVE),
    (0, b"Rar!\x1a\x07", ARCHIVE),
    (0, b"\x28\xb5\x2f\xfd", ARCHIVE),
    (0, b"\x04\x22\x4d\x18", ARCHIVE),
    (0, b"MSCF\0", ARCHIVE),
    (257, b"ustar", ARCHIVE),
    (0, b"\x7fELF", _PROGRAM),
    (0, b"\xca\xfe\xba\xbe", _PROGRAM),
    (0, b"\xcf\xfa\xed\xfe", _PROGRAM),
    (0, b"\0asm", _PROGRAM),
    (0, b"SQLite format 3\0", Foreign("a database", "write what is wanted of it to CSV")),
    (0, b"{\\rtf", Foreign("an RTF document", "save it as DOCX or PDF")),
    (0, b"%!PS", Foreign("PostScript", "make a PDF of it")),
)
_OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_SPREADSHEET = Foreign("a spreadsheet", "save its sheets as CSV")
_SLIDES = Foreign("slides", "save them as PDF")
_ODT = Foreign("an OpenDocument text", "save it as DOCX or PDF")
_OFFICE_PARTS = (
    ("xl/", _SPREADSHEET),
    ("ppt/", _SLIDES),
)
_OPEN_DOCUMENT = (
    (b"opendocument.text", _ODT),
    (b"opendocument.spreadsheet", _SPREADSHEET),
    (b"opendocument.presentation", _SLIDES),
    (b"opendocument", Foreign("an OpenDocument file", "save it as PDF")),
)
# A stream's name in a compound file is UTF-16.
_OLE_PARTS = (
    ("EncryptedPackage", Foreign("an encrypted document", "save it without its password", True)),
    ("WordDocument", Foreign("an old Word document", "save it as DOCX")),
    ("Workbook", _SPREADSHEET),
    ("PowerPoint Document", _SLIDES),
)


def kind_by_name(name: str) -> str | None:
    """The kind of document a file of this name is thought to be; None where the name says
    nothing."""
    if language_of(name):  # first: CMakeLists.txt
        return "code"
    return KIND_OF_SUFFIX.get(suffix_of(name))


def binary_kind(name: str, raw: bytes) -> str | Foreign | None:
    """What a file is whose bytes say so, from its first kilobytes or whole; None where they don't:
    text, or a binary that is not known. A ZIP archive is told only whole: from its beginning it is
    "zip"."""
    named = kind_by_name(name)
    start = raw[:1024].lstrip(b"\0\t\n\f\r ")
    if start.startswith(b"%PDF-") or (named == "pdf" and b"%PDF-" in raw[:1024]):
        return "pdf"
    if raw.startswith(_ZIP):
        return "zip"
    if raw.startswith(_OLE):
        return "ole"
    for offset, magic, foreign in _MAGIC:
        if raw.startswith(magic, offset):
            return foreign
    return None


def zip_kind(name: str, raw: bytes) -> str | Foreign:
    """What a whole file is that begins as a ZIP archive does."""
    named = kind_by_name(name)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            inside = archive.namelist()
            about = archive.read("mimetype")[:100] if _small(archive, "mimetype") else b""
    except Exception:  # zipfile raises a dozen kinds for what is damaged
        return named if named in BINARY_KINDS else ARCHIVE
    if b"epub" in about or "META-INF/container.xml" in inside:
        return "epub"
    if "word/document.xml" in inside or any(re.match(r"word/document\d*\.xml", n) for n in inside):
        return "docx"
    for mark, foreign in _OPEN_DOCUMENT:
        if mark in about:
            return foreign
    if "[Content_Types].xml" in inside:
        for folder, foreign in _OFFICE_PARTS:
            if any(part.startswith(folder) for part in inside):
                return foreign
    return named if named in BINARY_KINDS else ARCHIVE


def ole_kind(raw: bytes) -> Foreign:
    """What a compound file is: Office before 2007, or Office with a password."""
    for part, foreign in _OLE_PARTS:
        if part.encode("utf-16-le") in raw:
            return foreign
    return Foreign("an old Office file", "save it in a newer format")


def text_kind(name: str, text: str) -> str:
    """What a text is, by its looks and its file's name."""
    named = kind_by_name(name)
    suffix = suffix_of(name)
    if named != "markdown" and suffix not in _TEMPLATES and _PAGE.match(text[:16384]):
        return "html"
    if named == "html":
        return "html" if _TAG.search(text) else "text"
    if suffix in ("json", "ipynb", "txt", "") and text[:1024].lstrip()[:1] == "{":
        if '"nbformat"' in text and _CELLS.search(text):
            return "notebook"
        return "json" if named in ("json", "notebook") else "text"
    if named == "notebook":
        return "json"  # which says what is wrong with it
    if named in BINARY_KINDS or named is None:
        return "code" if language_of(name, text) else "text"
    return named


def _small(archive: zipfile.ZipFile, name: str) -> bool:
    try:
        return archive.getinfo(name).file_size <= 1000
    except KeyError:
        return False
