"""Web pages: their main text, as Markdown, without menus and feet."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

from engine.documents.content import Content, Converted, Unconvertible
from engine.documents.decoding import decode
from engine.documents.markup import (
    is_tangled,
    main_part,
    markdown_of,
    plain_headings,
    plain_text,
    strip,
    text_length,
    tidy,
    title_of,
    tree_of,
)

_CHARSET = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?\s*([\w.:-]{2,40})""", re.I)
_XML_CHARSET = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.:-]{2,40})""", re.I)
_MAX_CHARS = 32 * 2**20
_ENOUGH = 0.6
"""Share of a page's text, links aside, that its main text has; with less it is taken whole."""
_FENCE = re.compile(r"^(```.*?^```[ \t]*$)", re.M | re.S)
_ESCAPED = re.compile(r"\\([_*])")


def read(content: Content) -> Converted:
    raw = content.raw
    declared = _CHARSET.search(raw[:4096]) or _XML_CHARSET.search(raw[:4096])
    decoded = decode(raw, declared[1].decode() if declared else None)
    if decoded is None:
        raise Unconvertible("is text in an encoding that could not be told")
    if len(decoded.text) > _MAX_CHARS:
        notes = (*decoded.notes, "HTML of this size is read as text")
        return Converted(decoded.text, notes=notes)
    text = main_text(decoded.text)
    title = title_of(decoded.text)
    if title and text and not re.search(r"^# ", text, re.M):
        text = f"# {title}\n\n{text}"
    notes = decoded.notes
    if not text and decoded.text.strip():
        notes = (*notes, "no text: a page that programs fill?")
    return Converted(text, "markdown", notes=notes)


def main_text(html: str) -> str:
    """What a page calls its main part; else what looks like it; else all that is no menu."""
    tree = tree_of(html)
    if tree is None:
        return plain_text(html)
    plain_headings(tree)
    untouched = deepcopy(tree)
    strip(tree, around=True)
    body = tree.find("body")
    body = tree if body is None else body
    part = main_part(body)
    if part is not None:
        return markdown_of(part)
    main = "" if is_tangled(untouched) else _extracted(deepcopy(untouched))
    letters = len("".join(main.split()))
    if letters < _ENOUGH * text_length(body, links=False) or _lost_headings(body, main):
        main = markdown_of(body)
    if not main:  # all there is stands in what was taken for a menu
        strip(untouched, around=False)
        main = markdown_of(untouched)
    return main


def _lost_headings(body: Any, text: str) -> bool:
    headings = ["".join(item.itertext()).split() for item in body.iter("h1", "h2", "h3", "h4")]
    words = " ".join(text.split())
    return 2 * sum(" ".join(heading) in words for heading in headings) < len(headings)


def _extracted(tree: Any) -> str:
    """What trafilatura finds; nothing where it, or what it needs, is not installed."""
    try:
        import trafilatura
    except ImportError:  # some installers leave out lxml's cleaner
        return ""
    found = trafilatura.extract(
        tree,
        output_format="markdown",
        include_tables=True,
        include_formatting=True,
        include_links=False,
        include_images=False,
        favor_recall=True,
        deduplicate=False,
    )
    parts = _FENCE.split(found or "")
    parts[::2] = [_ESCAPED.sub(r"\1", part) for part in parts[::2]]
    return tidy("".join(parts))
