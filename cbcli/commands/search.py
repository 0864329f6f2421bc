"""`cacheblend search`: the stored chunks that fit a question, without asking a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from cache_store.catalog import ChunkInfo
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.chooser import Chooser
from cbcli.command import Json, Verbose, app_options, examples
from cbcli.fields import (
    CHUNK_ID,
    HEADINGS,
    POSITION,
    SHOWN_DIGITS,
    SOURCE,
    TEXT,
    TOKENS,
    place_text,
)
from cbcli.listing import Field, Fields, Jsonl, ListForm, Listing, QuietIds, Record
from cbcli.output import Output
from cbcli.question import read_question
from cbcli.records import chunk_record
from cbcli.session import shown_source
from cbcli.settings import load_settings
from cbcli.text import one_line

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
@flags.with_settings(flags.RETRIEVAL, "store", "offline", "pager", "progress", without=("order",))
def search(
    question: Annotated[
        str, typer.Argument(help="The question; - or nothing reads it from standard input.")
    ] = "-",
    full: Annotated[
        bool, typer.Option("--full", help="Print the whole text of every chunk.")
    ] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    jsonl: Jsonl = False,
    fields: Fields = None,
    quiet: QuietIds = False,
    verbose: Verbose = 0,
) -> None:
    """Find the stored chunks that fit a question, best first: what `ask` would answer from.

    No model is loaded. More score is better; what it means depends on the retriever. Neighbours
    of a hit have no rank and no score.
    """
    out = Output(
        json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields), options=options
    )
    settings = load_settings(options)
    text = read_question(question)
    with ChunkStore.open(settings.store, read_only=True) as opened:
        chooser = Chooser(opened, out)
        hits = {hit.chunk.chunk_id: hit for hit in chooser.hits(settings, text)}
        chunks = chooser.with_neighbours(settings, [hit.chunk for hit in hits.values()])
    found: list[Found] = []
    for chunk in chunks:
        hit = hits.get(chunk.chunk_id)
        found.append((chunk, hit.rank, hit.score) if hit else (chunk, None, None))
    if full and not (out.json or quiet or fields):
        with out.paged():
            _print_full(out, found)
        return
    records = [
        {"rank": rank, "score": score, **chunk_record(chunk)} for chunk, rank, score in found
    ]
    listing = _listing(headings=any(chunk.headings for chunk, _, _ in found))
    out.list(
        listing,
        records,
        rows=partial(_row, text, full=full),
        around=lambda hits: {"question": text, "hits": hits},
    )


def _listing(*, headings: bool) -> Listing:
    """The fields of a hit; headings: whether any chunk stands under one."""
    under = replace(HEADINGS, title="under", column=headings)
    fields = [
        Field("rank", right=True),
        Field("score", show=_score, right=True),
        CHUNK_ID,
        Field("where", "source", raw=False),
        under,
        replace(SOURCE, column=False),
        *(item for item in POSITION if item is not HEADINGS),
        replace(TOKENS, column=False),
        Field("snippet", "text", one_line, raw=False),
        replace(TEXT, title="beginning", column=False),
    ]
    return Listing("hits", "chunk_id", tuple(fields))


def _row(question: str, record: Record, *, full: bool) -> list[dict[str, Any]]:
    """A hit's line in the table: with its place, and what of it is about the question."""
    from cbcli.snippet import snippet
    from engine.retrieval.terms import question_terms

    place = place_text(record["place"])
    where = shown_source(record["source"]) + (f", {place}" if place else "")
    part = record["text"] if full else snippet(record["text"], question_terms(question), SNIPPET)
    return [{**record, "where": where, "snippet": part}]


def _print_full(out: Output, found: Sequence[Found]) -> None:
    for number, (chunk, rank, score) in enumerate(found):
        if number:
            out.line()
        said = f"{rank}. score {_score(score)}" if rank is not None else "beside a hit"
        under = f", under {' > '.join(chunk.headings)}" if chunk.headings else ""
        title = f"{said}  {chunk.chunk_id[:SHOWN_DIGITS]}  {_where(chunk)}{under}"
        out.line(one_line(title), style="bold")
        out.line(chunk.text.strip("\n"))


def _where(chunk: ChunkInfo) -> str:
    source = shown_source(chunk.source)
    return f"{source}, {chunk.place}" if chunk.place else source


def _score(score: float | None) -> str:
    return "" if score is None else f"{score:.4g}"
