"""What `doctor` says of reading documents, finding chunks, and the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module

from cbcli.checks import Check
from cbcli.settings import Settings
from cbcli.terminal import Looks, is_terminal

# What kinds of documents are read with; the rest needs nothing.
READERS = {
    "pdf": "pypdfium2",
    "docx": "mammoth",
    "html": "trafilatura",
    "epub": "lxml.etree",
    "encodings": "charset_normalizer",
}

# Kinds that are read without, and how.
WITHOUT = {"html": "pages are read whole, with their menus"}


def check_documents() -> Iterator[Check]:
    """Whether the libraries that read documents can be imported; some are half in C."""
    broken = {}
    for kind, module in READERS.items():
        try:
            import_module(module)
        except Exception as error:  # whatever an installation that doesn't fit raises
            why = str(error).partition("\n")[0]
            broken[kind] = f"{module}: {type(error).__name__}: {why}"
    facts = {kind: kind not in broken for kind in READERS}
    for kind, why in broken.items():
        if kind in WITHOUT:
            hint = f"{WITHOUT[kind]}: pip install lxml_html_clean"
            yield Check("documents", "warn", f"{kind}: {why}", hint, facts)
            continue
        package = READERS[kind].partition(".")[0].replace("_", "-")
        hint = f"such documents are not read: pip install --force-reinstall {package}"
        yield Check("documents", "fail", f"{kind}: {why}", hint, facts)
    if not broken:
        said = f"{', '.join(READERS)}: their readers can be imported"
        yield Check("documents", "ok", said, facts=facts)


def check_retriever(settings: Settings) -> Iterator[Check]:
    """Whether what finds chunks is here, its embedding model too; nothing is downloaded."""
    name = settings.retriever
    if name not in ("embed", "hybrid"):
        facts = {"retriever": name}
        if name == "bm25":
            try:
                import_module("bm25s")
            except Exception as error:  # an installation older than the code, or that doesn't fit
                said = f"bm25: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                hint = "nothing is found for a question: pip install --force-reinstall bm25s"
                yield Check("retriever", "fail", said, hint, facts)
                return
        yield Check("retriever", "ok", name, facts=facts)
        return
    from engine.retrieval.embed import find_model, require_model2vec

    facts = {"retriever": name, "embed_model": settings.embed_model}
    require_model2vec()
    folder = find_model(settings.embed_model, offline=True)
    yield Check("retriever", "ok", f"{name}, with {folder}", facts={**facts, "path": str(folder)})


def check_terminal() -> Iterator[Check]:
    """Where standard output goes to, and how."""
    encoding = sys.stdout.encoding or "unknown"
    terminal, coloured = is_terminal(sys.stdout), Looks(os.environ).coloured(sys.stdout)
    columns = shutil.get_terminal_size().columns
    facts = {
        "terminal": terminal,
        "columns": columns,
        "colour": coloured,
        "encoding": encoding,
        "term": os.environ.get("TERM", ""),
    }
    said = f"{columns} columns" if terminal else "none: stdout goes elsewhere"
    said += f", {'colour' if coloured else 'no colour'}, {encoding}"
    if encoding.lower().replace("-", "") not in ("utf8", "utf8sig"):
        hint = "other characters are spelt out: set LANG=C.UTF-8 or PYTHONUTF8=1"
        yield Check("terminal", "warn", said, hint, facts)
    else:
        yield Check("terminal", "ok", said, facts=facts)
