"""Markdown, its front matter made plain lines."""

import re

from engine.documents.content import Content, Converted

# YAML between lines of ---, TOML between lines of +++, at the very start.
_FRONT = re.compile(
    r"\A(?P<fence>---|\+\+\+)[ \t]*\n(?P<matter>.*?)^(?P=fence)[ \t]*(?:\n\s*|\Z)", re.S | re.M
)
_ENTRY = re.compile(r"""["']?[\w.-]+["']?\s*[:=](?:\s|$)|\[+[\w.-]+\]+$""")
_MAX_MATTER = 64 * 1024


def read(content: Content) -> Converted:
    """Front matter keeps its entries, which name the title and the tags, and loses the fences,
    which Markdown takes for a rule or for the underline of a heading."""
    text = content.text
    found = _FRONT.match(text[:_MAX_MATTER])
    if found and _ENTRY.match(found["matter"]):
        matter = found["matter"].strip("\n")
        body = text[found.end() :]
        text = f"{matter}\n\n{body}" if body else f"{matter}\n"
    return Converted(text, "markdown", notes=content.decoded.notes)
