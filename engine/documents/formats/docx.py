"""Word documents since 2007: headings, lists, tables and notes, by mammoth."""

from __future__ import annotations

import io

from engine.documents.archives import Archive
from engine.documents.content import Content, Converted, Unconvertible
from engine.documents.markup import markdown_of, plain_text, strip, tree_of

_MAX_XML = 32 * 2**20  # more takes minutes, and gigabytes


def read(content: Content) -> Converted:
    import mammoth

    archive = Archive(content.raw)
    for name in archive.names:
        if name.startswith("word/") and name.endswith(".xml"):
            archive.read(name, _MAX_XML)
    try:
        html = mammoth.convert_to_html(
            io.BytesIO(content.raw), convert_image=mammoth.images.img_element(lambda image: {})
        ).value
    except RecursionError:
        raise Unconvertible("is nested too deep to be read") from None
    tree = tree_of(html)
    if tree is None:
        return Converted(plain_text(html), "markdown")
    strip(tree, around=False)
    return Converted(markdown_of(tree), "markdown")
