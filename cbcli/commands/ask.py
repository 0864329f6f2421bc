"""`cacheblend ask`: an answer over the stored chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.catalog import ChunkInfo
from cache_store.errors import UsageError
from cbcli import flags
from cbcli.calibrated import Calibrated, PromptTokens
from cbcli.changes import ChangeWatch
from cbcli.chooser import Chooser
from cbcli.citations import Citations
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.explain import headline, why_not_faster
from cbcli.output import Output
from cbcli.present import remember
from cbcli.question import read_chunk_names, read_question
from cbcli.session import (
    audit_of,
    blend_options,
    check_engine,
    load_engine,
    open_blueprint,
    open_existing_store,
    sampling_options,
    say_notes,
    warn_of_faults,
)
from cbcli.settings import Settings, load_settings
from cbcli.traces import Tracing
from cbcli.usable import require_usable

if TYPE_CHECKING:
    from cbcli.live.ask import AskScene
    from engine.blueprint import Blueprint
    from engine.results import AskResult

ROOM = 64  # tokens for an answer, that a prompt has at least: a comparison takes some too

app = typer.Typer(**app_options())


@app.command(
    epilog=examples(
        "cacheblend ask 'When is the next planning meeting?'",
        "cacheblend ask --chunk 3f9a1c --chunk 77b0e2 --ratio 0.05 --compare 'Who signs off?'",
        "cacheblend search -q 'planning' | cacheblend ask --chunk - 'Who plans?'",
        "echo 'What is due in May?' | cacheblend ask --json - | jq .answer",
    )
)
@flags.with_settings(
    flags.RETRIEVAL,
    flags.BLEND,
    flags.TRACE,
    "live",
    "cite",
    flags.PROMPT,
    flags.SAMPLING,
    flags.STORE,
    flags.MODEL,
    flags.ENGINE,
    "progress",
)
def ask(
    question: Annotated[
        str, typer.Argument(help="The question; - or nothing reads it from standard input.")
    ] = "-",
    chunk: Annotated[
        list[str] | None,
        flags.chunks_option("A chunk's id or its beginning; repeat, in order. - reads them."),
    ] = None,
    indices: Annotated[
        str | None,
        typer.Option("--indices", help="Recompute these prompt positions instead: 40,52,60-75."),
    ] = None,
    compare: flags.Compare = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Record the run in this file, for inspect.")
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Answer a question over the stored chunks, in any order.

    Without --chunk the best chunks for the question are looked up. Their stored KV is put
    together, and only the tokens that differ most from a full prefill are computed again.
    -v says where the time went, and why it wasn't less.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    positions = None if indices is None else parse_indices(indices)
    if positions is not None and options.get("policy") not in (None, "explicit"):
        raise UsageError("--indices and --policy exclude each other", "give one of them")
    check_engine(settings, "live")
    tracing = Tracing(settings, trace)
    text = read_question(question)
    names = read_chunk_names(chunk, question)
    with open_existing_store(settings) as opened, _scene(out, settings) as scene:
        tell = scene.phase if scene is not None else lambda name: None
        began = time.perf_counter()
        tell("retrieve")
        chunks = Chooser(opened, out).choose(settings, text, names)
        warn_of_faults(opened, out)
        retrieve_s = time.perf_counter() - began
        began = time.perf_counter()
        tell("open")
        blueprint = open_blueprint(settings, out)
        tell("hash")
        remember(settings, blueprint)  # hashes weights that are new
        open_s = time.perf_counter() - began
        calibrated = Calibrated.open(blueprint, out, opened)
        wanted = settings if positions is None else replace(settings, policy="explicit")
        tokens = _tokens(blueprint, chunks, text, cite=settings.cite)
        wanted = calibrated.settle(wanted, tokens)
        blend = blend_options(wanted, positions)
        blend.check_model(blueprint.config.layers)
        tracing.check_model(blueprint.config.layers)
        told = require_usable(out, opened, blueprint, settings, chunks)
        if scene is not None:
            scene.about(blueprint.config.layers, blend)
        tell("load")
        longest = tokens.total + max(settings.max_tokens, ROOM)
        with load_engine(settings, blueprint, opened, longest=longest, out=out) as loaded:
            tell("tokenize")
            result = loaded.ask(
                text,
                [loaded.chunk(piece.text, piece.source) for piece in chunks],
                cite=settings.cite,
                blend=blend,
                sampling=sampling_options(settings),
                compare=compare,
                audit=audit_of(settings, opened),
                save=settings.save,
                on_text=None if out.json else out.piece,
                trace=tracing.level,
                trace_layers=settings.trace_layers,
                observer=scene,
            )
        calibrated.saw(settings, result)
        changes = ChangeWatch(opened).lines(chunks)
    say_notes(opened, out)
    timing = replace(
        result.timing,
        load_model_s=open_s + result.timing.load_model_s,
        retrieve_s=retrieve_s,
        total_s=open_s + retrieve_s + result.timing.total_s,
    )
    result = result.timed(timing)
    from engine.lookups import OTHER_MODEL

    notes = [note for note in result.notes if not (told and OTHER_MODEL in note)]
    result = replace(result, notes=(*notes, *changes))
    cited = Citations.of(result.answer, list(enumerate(chunks, 1))) if settings.cite else None
    _report(out, result, cited)
    if result.trace is not None:
        tracing.save(result.trace, out.warn)


def parse_indices(text: str) -> list[int]:
    """Positions from "40,52,60-75" (the end included). Raises UsageError."""
    positions: list[int] = []
    for part in (piece.strip() for piece in text.split(",")):
        first, dash, last = part.partition("-")
        if not (part.isascii() and first.isdecimal() and (last.isdecimal() or not dash)):
            raise UsageError(
                f"--indices: {part!r} is no position", "write positions and ranges: 40,52,60-75"
            )
        end = int(last) if dash else int(first)
        if end < int(first) or end - int(first) > 10**7:
            raise UsageError(
                f"--indices: {part!r} is no range of positions", "write the lower end first: 60-75"
            )
        positions += range(int(first), end + 1)
    return positions


def _tokens(
    blueprint: Blueprint, chunks: Sequence[ChunkInfo], question: str, *, cite: bool
) -> PromptTokens:
    """How long the prompt will be."""
    template, cached = blueprint.template, sum(chunk.tokens for chunk in chunks)
    between = len(template.separator) * max(0, len(chunks) - 1)
    if cite:
        between = sum(map(len, template.leads(range(1, len(chunks) + 1))))
    prefix, suffix = len(template.prefix), len(template.suffix(question, cite=cite))
    return PromptTokens(prefix + cached + between + suffix, cached, prefix)


@contextmanager
def _scene(out: Output, settings: Settings) -> Iterator[AskScene | None]:
    """What shows the run while it goes on, where that is wanted."""
    if not settings.live or settings.engine == "vllm":  # whose runs cannot be watched
        yield None
        return
    from cbcli.live.ask import AskScene

    scene = AskScene(streams=not out.json)
    with out.live(scene) as scene.view:
        yield scene


def _report(out: Output, result: AskResult, cited: Citations | None) -> None:
    out.end_pieces()  # what is said begins on a line of its own
    for note in result.notes:
        out.warn(note)
    if out.json:
        out.data(result.to_json() | (cited.to_json() if cited is not None else {}))
        return
    if cited is not None:
        cited.print(out)
    out.note(headline(result))
    if out.verbose:
        for reason in why_not_faster(result):
            out.note(reason, level=1)
