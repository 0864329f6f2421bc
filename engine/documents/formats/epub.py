"""EPUB books: their chapters in reading order."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from engine.documents.archives import Archive
from engine.documents.content import Content, Converted, Unconvertible
from engine.documents.decoding import decode
from engine.documents.document import Mark
from engine.documents.markup import markdown_of, plain_text, strip, title_of, tree_of

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_RIGHTS = ("META-INF/rights.xml", "META-INF/sinf.xml")
_MAX_PART = 32 * 2**20
_PAGE_TYPES = ("application/xhtml+xml", "text/html", "application/x-dtbook+xml")
_ENCODING = re.compile(rb"""encoding\s*=\s*["']([\w.:-]{2,40})""")


def read(content: Content) -> Converted:
    archive = Archive(content.raw)
    chapters = list(dict.fromkeys(_spine(archive)))
    if not chapters:
        raise Unconvertible("is damaged: it does not say where its chapters are")
    _check_rights(archive, chapters)
    parts, marks, place, lost = [], [], 0, 0
    for number, name in enumerate(chapters, 1):
        try:
            text = _chapter(archive.read(name, _MAX_PART))
        except Unconvertible:
            lost += 1
            continue
        if text:
            marks.append(Mark(place, "chapter", number))
            parts.append(f"{text}\n")
            place += len(text) + 1
    if lost == len(chapters):
        raise Unconvertible("is damaged: none of its chapters can be read")
    notes = (f"{lost} of {len(chapters)} chapters can't be read",) if lost else ()
    return Converted("".join(parts)[:-1], "markdown", tuple(marks), notes)


def _chapter(raw: bytes) -> str:
    told = _ENCODING.search(raw[:200])
    decoded = decode(raw, told[1].decode() if told else None)
    if decoded is None:
        return ""
    tree = tree_of(decoded.text)
    if tree is None:
        return plain_text(decoded.text)
    strip(tree, around=False)
    text = markdown_of(tree)
    title = title_of(decoded.text)
    if text and title and not text.lstrip().startswith("#") and title not in text[:500]:
        text = f"# {title}\n\n{text}"
    return text


def _spine(archive: Archive) -> Iterator[str]:
    """The names of the chapters' files, in order."""
    root = _xml(archive.read(_CONTAINER, _MAX_PART))
    package = next((item.get("full-path") for item in _named(root, "rootfile")), None)
    if not package:
        raise Unconvertible("is damaged: it does not say where its chapters are")
    opf = _xml(archive.read(package, _MAX_PART))
    items = {item.get("id"): item for item in _named(opf, "item")}
    folder = posixpath.dirname(package)
    known = set(archive.names)
    order = [items.get(reference.get("idref")) for reference in _named(opf, "itemref")]
    for item in order or items.values():
        if item is None or "nav" in (item.get("properties") or "").split():
            continue
        if (item.get("media-type") or _PAGE_TYPES[0]) not in _PAGE_TYPES:
            continue
        href = (item.get("href") or "").split("#")[0]
        for name in (href, unquote(href)):
            path = posixpath.normpath(posixpath.join(folder, name))
            if path in known:
                yield path
                break
        else:
            yield href  # told as one that can't be read


def _check_rights(archive: Archive, chapters: list[str]) -> None:
    """Raises Unconvertible for a book that only some readers may open; fonts alone may be
    encrypted in any book."""
    locked = any(name in archive.names for name in _RIGHTS)
    if not locked and _ENCRYPTION in archive.names:
        root = _xml(archive.read(_ENCRYPTION, _MAX_PART))
        names = {unquote(item.get("URI") or "") for item in _named(root, "CipherReference")}
        locked = bool(names & set(chapters))
    if locked:
        raise Unconvertible("is protected (DRM); only its own readers can open it")


def _xml(raw: bytes) -> Any:
    from lxml import etree

    parser = etree.XMLParser(recover=True, resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(raw, parser)
    except (etree.LxmlError, ValueError):
        root = None
    if root is None:
        raise Unconvertible("is damaged: its table of contents can't be read")
    return root


def _named(root: Any, name: str) -> list[Any]:
    """Elements of a name, in whatever namespace."""
    return list(root.iter(f"{{*}}{name}"))
