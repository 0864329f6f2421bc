"""`cacheblend store show`: one chunk, its text, and what is stored of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cache_store.store import ChunkStore
from cbcli import completion, flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.output import Output
from cbcli.present import recall
from cbcli.records import position_record
from cbcli.session import shown_source
from cbcli.settings import Settings, load_settings
from cbcli.store_listing import StoreListing
from cbcli.units import count_text

EXAMPLES = examples(
    "cacheblend store show 3f9a1c2b7d04", "cacheblend store show 3f9a1c --tokens --json"
)


@flags.with_settings("model", "store", "pager")
def show(
    chunk: Annotated[
        str,
        typer.Argument(
            autocompletion=completion.chunks, help="A chunk's id, or the beginning of it."
        ),
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also the chunk's token ids, with their text.")
    ] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show a chunk: where it is from, what is stored of it, and its text."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    with ChunkStore.open(settings.store, read_only=True) as store:
        found = store.catalog.chunk(chunk)
        places = store.catalog.places(found.chunk_id)
        listing = StoreListing(store, recall(settings))
        cut = _tokens(settings, found.text) if tokens else None
        if json:
            described: dict[str, Any] = {
                **listing.chunk(found),
                "places": [position_record(place) for place in places],
            }
            if cut is not None:
                described["token_ids"] = [number for number, _ in cut]
                described["token_texts"] = [text for _, text in cut]
            out.data(described)
            return
        pairs: list[tuple[str, object]] = [("chunk", found.chunk_id)]
        for place in places:
            where = f"chunk {place.ordinal}, characters {place.start} to {place.end}"
            where += f", {place.place}" if place.place else ""
            pairs.append(("source", f"{shown_source(place.source)}, {where}"))
        pairs.append(("tokens", count_text(found.tokens)))
        pairs += [("cached", line) for line in listing.entry_lines(found.chunk_id) or ["no"]]
        with out.paged():
            out.pairs(pairs)
            out.line()
            if cut is None:
                out.line(found.text)
            else:
                rows = [[str(n), str(number), repr(text)] for n, (number, text) in enumerate(cut)]
                out.table(["place", "id", "text"], rows, right=["place", "id"])


def _tokens(settings: Settings, text: str) -> list[tuple[int, str]]:
    """Ids and texts of a chunk's tokens, as the present model's tokenizer cuts it.

    Raises NotFoundError where the model isn't here.
    """
    from engine.library import resolve
    from engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(resolve(settings.model, settings.models_dir))
    ids = tokenizer.encode(text)
    return list(zip(ids, tokenizer.token_spans(ids), strict=True))
