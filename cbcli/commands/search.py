"""`cacheblend search`: the stored chunks that fit a question, without asking a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cache_store.catalog import ChunkInfo
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.chooser import Chooser
from cbcli.command import Json, Verbose, app_options, examples
from cbcli.output import Output
from cbcli.question import read_question
from cbcli.records import chunk_record
from cbcli.session import shown_source
from cbcli.settings import load_settings

DIGITS = 12  # of a chunk's id, in the table
SNIPPET = 160  # characters

app = typer.Typer(**app_options())

# A chunk and its rank and score; a neighbour of a hit has neither.
Found = tuple[ChunkInfo, int | None, float | None]


@app.command(
    epilog=examples(
        "cacheblend search 'When is the next planning meeting?'",
        "cacheblend search --top-k 20 --jsonl 'planning' | jq -r .source",
        "cacheblend search -q 'planning' | cacheblend ask --chunk - 'Who plans?'",
    )
)
@flags.with_settings(flags.RETRIEVAL, "store", without=("order",))
def search(
    question: Annotated[
        str, typer.Argument(help="The question; - or nothing reads it from standard input.")
    ] = "-",
    full: Annotated[
        bool, typer.Option("--full", help="Print the whole text of every chunk.")
    ] = False,
    options: flags.Options = flags.NONE,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Print one JSON object a chunk, a line each.")
    ] = False,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the ids alone.")] = False,
    verbose: Verbose = 0,
) -> None:
    """Find the stored chunks that fit a question, best first: what `ask` would answer from.

    No model is loaded. More score is better; what it means depends on the retriever. Neighbours
    of a hit have no rank and no score.
    """
    out = Output(json=json or jsonl, quiet=quiet, verbose=verbose)
    settings = load_settings(options)
    text = read_question(question)
    with ChunkStore.open(settings.store, read_only=True) as opened:
        chooser = Chooser(opened)
        hits = {hit.chunk.chunk_id: hit for hit in chooser.hits(settings, text)}
        chunks = chooser.with_neighbours(settings, [hit.chunk for hit in hits.values()])
    found: list[Found] = []
    for chunk in chunks:
        hit = hits.get(chunk.chunk_id)
        found.append((hit.chunk, hit.rank, hit.score) if hit else (chunk, None, None))
    if jsonl:
        for one in found:
            out.data(_record(one))
    elif json:
        out.data({"question": text, "hits": [_record(one) for one in found]})
    elif quiet:
        for chunk, _, _ in found:
            out.line(chunk.chunk_id)
    elif full:
        _print_full(out, found)
    else:
        _print_table(out, text, found)


def _record(found: Found) -> dict[str, Any]:
    chunk, rank, score = found
    return {"rank": rank, "score": score, **chunk_record(chunk)}


def _print_table(out: Output, question: str, found: Sequence[Found]) -> None:
    from cbcli.snippet import snippet
    from engine.retrieval.terms import question_terms

    wanted = question_terms(question)
    rows = [
        [
            "" if rank is None else rank,
            _score(score),
            chunk.chunk_id[:DIGITS],
            _where(chunk),
            " > ".join(chunk.headings),
            snippet(chunk.text, wanted, SNIPPET),
        ]
        for chunk, rank, score in found
    ]
    headers = ["rank", "score", "chunk", "source", "under", "text"]
    if not any(chunk.headings for chunk, _, _ in found):
        headers.remove("under")
        rows = [[*row[:4], row[5]] for row in rows]
    out.table(headers, rows, right=["rank", "score"])


def _print_full(out: Output, found: Sequence[Found]) -> None:
    for number, (chunk, rank, score) in enumerate(found):
        if number:
            out.line()
        said = f"{rank}. score {_score(score)}" if rank is not None else "beside a hit"
        under = f", under {' > '.join(chunk.headings)}" if chunk.headings else ""
        out.line(f"{said}  {chunk.chunk_id[:DIGITS]}  {_where(chunk)}{under}", style="bold")
        out.line(chunk.text.strip("\n"))


def _where(chunk: ChunkInfo) -> str:
    source = shown_source(chunk.source)
    return f"{source}, {chunk.place}" if chunk.place else source


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"
