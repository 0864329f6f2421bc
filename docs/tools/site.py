"""What MkDocs asks while it builds: pages that nothing names, and the list of schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
SCHEMAS = "<!-- the list of schemas -->"


def on_config(config: Any) -> Any:
    """Each section that begins with a folder's index gets that folder's other pages."""
    named = set(_pages(config["nav"]))
    for section in config["nav"]:
        for pages in section.values() if isinstance(section, dict) else ():
            folder = Path(pages[0]).parent
            pages += sorted(
                page
                for path in (DOCS / folder).glob("*.md")
                if (page := path.relative_to(DOCS).as_posix()) not in named
            )
    return config


def on_page_markdown(markdown: str, page: Any, **named: Any) -> str:
    """Puts the list of JSON Schema files where a page asks for it, and lets a folder's index
    link to all pages of it."""
    path = DOCS / page.file.src_uri
    if path.name == "index.md" and path.parent != DOCS:
        markdown += _others(path.parent, markdown)
    return markdown.replace(SCHEMAS, schema_list()) if SCHEMAS in markdown else markdown


def schema_list() -> str:
    """A line of Markdown for each file of docs/reference/schemas."""
    lines = []
    for path in sorted((DOCS / "reference/schemas").glob("*.json")):
        schema = json.loads(path.read_text("utf-8"))
        says = schema.get("description") or schema.get("title") or ""
        lines.append(f"- [`{path.name}`](schemas/{path.name}){': ' if says else ''}{says}")
    return "\n".join(lines)


def _others(folder: Path, markdown: str) -> str:
    left = [
        f"[{_title(path)}]({path.name})"
        for path in sorted(folder.glob("*.md"))
        if path.name != "index.md" and f"({path.name}" not in markdown
    ]
    return f"\n\nAlso here: {', '.join(left)}.\n" if left else ""


def _title(path: Path) -> str:
    lines = path.read_text("utf-8").splitlines()
    return next((line[2:] for line in lines if line.startswith("# ")), path.stem)


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    inside = nav.values() if isinstance(nav, dict) else nav
    return [page for part in inside for page in _pages(part)]
