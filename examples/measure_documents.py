"""How fast documents are read and cut into chunks, and in how much memory.

    CACHEBLEND_MODELS_DIR=.cache/models python examples/measure_documents.py [--megabytes 20]

Corpora are made of the example documents in a temporary folder: 1,000 Markdown files of 2 kB, as
many HTML pages, PDF pages where reportlab is installed, and one large text. Each is read and cut
by a process of its own, one thread; then the large text goes through `ingest --dry-run`, and
through `ingest` into a store it does not fit, which has to say so. A page is 2 kB; no KV is
computed. Times are of the CPU, so that others on the machine count little; memory is the process's
peak; "imports" is a process that reads next to nothing.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DOCS = Path(__file__).parent / "docs"
COMMAND = [sys.executable, "-c", "from cbcli.main import main; main()"]
PAGE = 2000  # bytes


def text_of(size: int) -> Iterator[str]:
    """The example documents over and over, each time with other words in them; `size` in all."""
    text = "\n\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    turn = 0
    while size > 0:
        varied = text.replace("the ", f"the {turn} " if turn else "the ")[:size]
        size -= len(varied)
        turn += 1
        yield varied


def pages(count: int) -> Iterator[str]:
    text = "".join(text_of(count * PAGE))
    return (text[n * PAGE : (n + 1) * PAGE] for n in range(count))


def make_markdown(folder: Path, count: int) -> None:
    for number, page in enumerate(pages(count)):
        (folder / f"{number}.md").write_text(f"# Page {number}\n\n{page}")


def make_html(folder: Path, count: int) -> None:
    for number, page in enumerate(pages(count)):
        said = "".join(f"<p>{html.escape(part)}</p>\n" for part in page.split("\n\n"))
        whole = f"<html><head><title>{number}</title></head><body><nav>Menu</nav><main>{said}"
        (folder / f"{number}.html").write_text(f"{whole}</main></body></html>")


def make_pdf(folder: Path, count: int) -> None:
    from reportlab.pdfgen.canvas import Canvas

    for number in range(0, count, 50):
        canvas = Canvas(str(folder / f"{number}.pdf"))
        for page in pages(50):
            lines = canvas.beginText(50, 800)
            for start in range(0, len(page), 90):
                lines.textLine(page[start : start + 90].replace("\n", " "))
            canvas.drawText(lines)
            canvas.showPage()
        canvas.save()


def cut(folder: str, model: str) -> None:
    """In a process of its own: reads and cuts all that is in a folder, and says what it took."""
    from engine.chunking import Cutting
    from engine.documents import Document, find_files, read_documents
    from engine.tokenizer import Tokenizer

    tokenizer, cutting = Tokenizer.load(Path(model)), Cutting()
    began = time.process_time()
    documents = chunks = characters = 0
    for item in read_documents(find_files([folder])):
        if isinstance(item, Document):
            documents += 1
            characters += len(item.text)
            chunks += sum(1 for _ in cutting.cut(item, tokenizer))
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([documents, chunks, characters, seconds, peak]))


def measure(name: str, folder: Path, model: str) -> None:
    """A line about one corpus."""
    command = [sys.executable, __file__, "--cut", str(folder), "--model", model]
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    documents, chunks, characters, seconds, peak = json.loads(done)
    minute = characters / PAGE / seconds * 60 if seconds else 0
    print(
        f"{name:20}{documents:>10,}{chunks:>8,}{minute:>16,.0f}"
        f"{characters / seconds / 1e6:>8.2f}{kilobytes(peak):>10}"
    )


def kilobytes(peak: int) -> str:
    return f"{peak / (1 if sys.platform != 'darwin' else 1024) / 1024:,.0f} MB"


def run(name: str, *arguments: str) -> None:
    """A line about one command: its exit code, seconds and peak memory."""
    command = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    _, status, usage = os.wait4(command.pid, 0)
    seconds = usage.ru_utime + usage.ru_stime
    said = command.stderr.read().strip() if command.stderr else ""
    code = os.waitstatus_to_exitcode(status)
    print(f"{name:28}exit {code}{seconds:>9.1f} s{kilobytes(usage.ru_maxrss):>10}  {said[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=20, help="of the large text")
    parser.add_argument("--pages", type=int, default=1000, help="of each other corpus")
    parser.add_argument("--model", default=str(models() / "smollm2-135m"), help="with tokenizer")
    parser.add_argument("--cut", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cut:
        cut(options.cut, options.model)
        return
    makers: dict[str, Callable[[Path, int], None]] = {
        "Markdown": make_markdown,
        "HTML": make_html,
        "PDF": make_pdf,
    }
    heads = ("documents", 10), ("chunks", 8), ("pages a minute", 16), ("MB/s", 8), ("peak", 10)
    print(f"{'corpus':20}" + "".join(f"{head:>{width}}" for head, width in heads))
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        for name, make in makers.items():
            folder = root / name
            folder.mkdir()
            try:
                make(folder, options.pages)
            except ImportError as error:
                print(f"{name:20}not made: {error}")
                continue
            measure(name, folder, options.model)
        folder = root / "text"
        folder.mkdir()
        large = folder / "large.txt"
        with large.open("w") as file:
            file.writelines(text_of(int(options.megabytes * 1e6)))
        measure(f"text, {options.megabytes:g} MB", folder, options.model)
        print()
        run("imports", "ingest", "--dry-run", "--json", str(DOCS / "history.md"))
        run("ingest --dry-run --json", "ingest", "--dry-run", "--json", str(large))
        store = ["--store", str(root / "store"), "--limit", "100MB"]
        run("ingest, refused", "ingest", *store, str(large))


def models() -> Path:
    return Path(os.environ.get("CACHEBLEND_MODELS_DIR", ".cache/models"))


if __name__ == "__main__":
    main()
