"""HTML to Markdown, whole: what pages, Word files and books are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

_NEVER_TEXT = (
    *("script", "style", "template", "noscript", "svg", "math-annotation", "iframe", "object"),
    *("embed", "canvas", "audio", "video", "head", "select", "button", "input", "textarea"),
)
_AROUND = ("header", "footer", "aside")
_SILENT = ("script", "style", "template", "title")
_ROLES_AROUND = ("banner", "contentinfo", "complementary")
_LISTS = ("ul", "ol", "table", "div", "p", "section")
_MENU_LINKS = 5
_MOST_STEPS = 4_000_000
_PERMALINKS = ("", "#", "¶", "§", "🔗", "Link")
_XML_DECLARATION = re.compile(r"\s*<\?xml[^>]{0,300}\?>")
_DECLARATIONS = re.compile(r"\A\s*<!DOCTYPE[^<>\[]{0,300}\[.{0,20000}?\]\s*>", re.I | re.S)
_BLANK_LINES = re.compile(r"\n(?:[ \t\xa0]*\n){2,}")
_TRAILING = re.compile(r"[ \t\xa0]+$", re.M)
_TITLE = re.compile(r"<title[^>]{0,200}>(.{0,1000}?)</title", re.I | re.S)
_LANGUAGE = re.compile(r"(?:language|lang|brush:?)[-\s]?([\w+#-]{1,20})")


def tree_of(html: str) -> Any:
    """Its lxml tree; None where there is nothing in it, or it is nested too deep for one."""
    from lxml import etree
    from lxml import html as lxml_html

    text = _XML_DECLARATION.sub("", html, count=1).replace("\0", "\ufffd")
    text = _DECLARATIONS.sub("<!DOCTYPE html>", text, count=1)
    if not text.strip():
        return None
    tree = None
    for huge in (False, True):  # huge: with a script or text of more than 10 MB
        parser = lxml_html.HTMLParser(huge_tree=huge)
        try:
            tree = lxml_html.document_fromstring(text, parser=parser)
        except (etree.LxmlError, ValueError):
            tree = None
        if any("depth" in item.message for item in parser.error_log):
            return None
        if not any(item.level == etree.ErrorLevels.FATAL for item in parser.error_log):
            break
    return tree


def plain_text(html: str) -> str:
    """The words of what `tree_of` can't read."""
    reader = _Words()
    reader.feed(html)
    reader.close()
    return tidy("\n\n".join(part.strip() for part in reader.parts if part.strip()))


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in _SILENT

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in _SILENT and self._silent > 0

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data)


def strip(tree: Any, *, around: bool) -> None:
    """Takes out of a tree what is no text, and with `around` what stands around it: menus, feet,
    and lists of links wherever they are outside its main part."""
    from lxml import etree

    for element in list(tree.iter(*_NEVER_TEXT, etree.Comment, etree.ProcessingInstruction)):
        _drop(element)
    if not around:
        return
    inner, links, letters, linked, mains = (dict[Any, int]() for _ in range(5))
    menus = []
    for event, element in etree.iterwalk(tree, events=("start", "end")):
        parent = element.getparent()
        if event == "start":
            inner[element] = inner.get(parent, 0) or element.tag in ("main", "article")
            continue
        own = sum(len("".join((text or "").split())) for text in _texts(element))
        children = list(element)
        letters[element] = own + sum(letters[child] for child in children)
        is_link = element.tag == "a"
        links[element] = is_link + sum(links[child] for child in children)
        linked[element] = letters[element] if is_link else sum(linked[c] for c in children)
        mains[element] = (element.tag == "main") + sum(mains[child] for child in children)
        role = element.get("role")
        menu = element.tag == "nav" or role in ("navigation", "search")
        if not inner[parent if parent is not None else element]:
            menu = menu or element.tag in _AROUND or role in _ROLES_AROUND
            if element.tag in _LISTS and links[element] >= _MENU_LINKS:
                menu = menu or linked[element] >= 0.85 * letters[element]
        if menu and not mains[element] and element.tag not in ("html", "body"):
            menus.append(element)
    for element in menus:
        _drop(element)


def _texts(element: Any) -> Iterator[str | None]:
    """The text that is in an element and in none of its children."""
    yield element.text
    for child in element:
        yield child.tail


def main_part(body: Any) -> Any | None:
    """The element that a page itself calls its main part, if most of the text is in it."""
    parts = [*body.iter("main", "article"), *body.iterfind(".//*[@role='main']")]
    largest = max(parts, key=text_length, default=None)
    whole = text_length(body)
    return largest if largest is not None and text_length(largest) > 0.4 * whole else None


def text_length(tree: Any, *, links: bool = True) -> int:
    """Letters of it, white space aside; without `links` those of no link."""
    total = sum(len("".join(part.split())) for part in tree.itertext())
    outer = () if links else tree.xpath(".//a[not(ancestor::a)]")
    return total - sum(text_length(link) for link in outer)


def plain_headings(tree: Any) -> None:
    """Takes the links out of headings, and the signs that link to a heading itself: what is a
    link alone counts as a menu."""
    for heading in tree.iter("h1", "h2", "h3", "h4", "h5", "h6"):
        for link in list(heading.iter("a", "button")):
            if "".join(link.itertext()).strip() in _PERMALINKS:
                _drop(link)
            elif link.getparent() is not None:
                link.drop_tag()


def markdown_of(tree: Any) -> str:
    """A stripped tree as Markdown: headings, lists, tables, code; of links and images the words.
    Of one that is tangled the words alone."""
    from lxml import etree
    from markdownify import MarkdownConverter

    converter = MarkdownConverter(
        heading_style="ATX",
        bullets="-",
        strip=["a", "img"],
        escape_asterisks=False,
        escape_underscores=False,
        code_language_callback=_language,
        table_infer_header=True,
    )
    for cell in tree.iter("td", "th"):
        for part in cell.iter(etree.Element):
            part.text = part.text and part.text.replace("|", "\\|")
            if part is not cell:
                part.tail = part.tail and part.tail.replace("|", "\\|")
    try:
        if not is_tangled(tree):
            html = etree.tostring(tree, encoding="unicode", method="html")
            return tidy(str(converter.convert(html)))
    except RecursionError:
        pass
    return tidy("\n\n".join(part.strip() for part in tree.itertext() if part.strip()))


def is_tangled(tree: Any) -> bool:
    """Whether it is so large and deep that what looks at everything around each element, as the
    libraries do, would take minutes."""
    from lxml import etree

    depth = total = 0
    for event, _ in etree.iterwalk(tree, events=("start", "end")):
        depth += 1 if event == "start" else -1
        total += depth
    return total > _MOST_STEPS


def tidy(markdown: str) -> str:
    """No more than one blank line at a time, none at its ends, no spaces at a line's end."""
    text = _BLANK_LINES.sub("\n\n", _TRAILING.sub("", markdown.replace("\r\n", "\n")))
    return text.strip("\n") + "\n" if text.strip() else ""


def title_of(html: str) -> str:
    from html import unescape

    found = _TITLE.search(html[:100_000])
    return " ".join(unescape(found[1]).split()) if found else ""


def _drop(element: Any) -> None:
    """Takes an element out with what is in it; the text behind it stays."""
    parent, before = element.getparent(), element.getprevious()
    if parent is None:
        return
    tail = element.tail or ""
    if before is None:
        parent.text = (parent.text or "") + tail
    else:
        before.tail = (before.tail or "") + tail
    parent.remove(element)


def _language(element: Any) -> str:
    for item in (element, element.find("code") if hasattr(element, "find") else None):
        classes = item.get("class") if item is not None else None
        for name in classes or ():
            found = _LANGUAGE.match(name)
            if found:
                return found[1]
    return ""
