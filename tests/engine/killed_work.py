"""Run as a program: for every line on standard input forks a child that works at a store until it
is done or killed. Importing takes seconds, so it is done once; and nothing is computed here, as a
process whose threads have computed must not fork.

A line is JSON: model, store, edition, what ("ingest" or "ask"), told (a file the child writes to).
"""

import json
import os
import random
import signal
import sys
from collections.abc import Mapping

import torch

from cache_store.store import ChunkStore
from engine.api import Engine
from engine.blueprint import Blueprint
from engine.documents import Document
from engine.ingest import IngestReport, run_ingest
from engine.ingest_plan import Cutter, Cutting
from engine.options import SamplingOptions

DOCUMENTS = 6


def document(number: int, edition: int) -> Document:
    sentences = (f"Sentence {n} of document {number} in edition {edition}." for n in range(30))
    return Document(f"{number}.md", f"{number} {edition}", " ".join(sentences))


def ingest(job: Mapping[str, str], told: int) -> None:
    """Tells, a byte each, of every document that its report says is complete."""
    model = Blueprint.open(job["model"], device="cpu", dtype="fp32")
    with ChunkStore.open(job["store"], on_damage="mend") as store:
        cutter, report, said = Cutter(store, model, Cutting(chunk_tokens=24)), IngestReport(), 0
        plan = cutter.plan(document(n, int(job["edition"])) for n in range(DOCUMENTS))

        def tell(tokens: int) -> None:
            nonlocal said
            os.write(told, b"." * (report.documents - said))
            said = report.documents

        def writer():  # type: ignore[no-untyped-def]
            return Engine.load(model, store=store, threads=1).writer()

        run_ingest(plan, cutter, writer, report, tell)
        tell(0)


def ask(job: Mapping[str, str], told: int) -> None:
    """Prompts over chunks that nobody has stored, which they save; a byte for each answer."""
    model, dice = Blueprint.open(job["model"], device="cpu", dtype="fp32"), random.Random()
    with ChunkStore.open(job["store"], on_damage="go_on") as store:
        engine = Engine.load(model, store=store, threads=1)
        for _ in range(40):
            chunks = [engine.chunk(f"Loose words number {dice.random()}.") for _ in range(3)]
            engine.ask("What?", chunks, sampling=SamplingOptions(max_tokens=1))
            os.write(told, b".")


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        job = json.loads(line)
        told = os.open(job["told"], os.O_WRONLY)  # a pipe: it is at its end when the child is
        child = os.fork()
        if child == 0:
            os.write(told, b"!")
            (ingest if job["what"] == "ingest" else ask)(job, told)
            os._exit(0)
        os.close(told)
        print(child, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
