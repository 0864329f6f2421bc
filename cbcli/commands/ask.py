"""`cacheblend ask`: an answer over the stored chunks."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.catalog import ChunkInfo
from cache_store.errors import IntegrityError, NotFoundError, UsageError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.explain import headline, why_not_faster
from cbcli.output import Output
from cbcli.session import open_blueprint, open_store
from cbcli.settings import Settings, load_settings

if TYPE_CHECKING:
    from engine.blueprint import Blueprint
    from engine.options import BlendOptions
    from engine.results import AskResult

app = typer.Typer(**app_options())


@app.command(
    epilog=examples(
        "cacheblend ask 'When is the next planning meeting?'",
        "cacheblend ask --chunk 3f9a1c --chunk 77b0e2 --ratio 0.05 --compare 'Who signs off?'",
        "echo 'What is due in May?' | cacheblend ask --json - | jq .answer",
    )
)
def ask(
    question: Annotated[
        str, typer.Argument(help="The question; - or nothing reads it from standard input.")
    ] = "-",
    chunk: Annotated[
        list[str] | None,
        typer.Option("--chunk", "-c", help="A chunk's id or its beginning; repeat, in order."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option("--top-k", "-k", help="Chunks to retrieve for the question.")
    ] = None,
    order: Annotated[
        str | None, typer.Option("--order", help="given, score, source or shuffle.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="blend, reuse, full or prefix.")
    ] = None,
    ratio: Annotated[
        str | None,
        typer.Option(
            "--ratio",
            "-r",
            help="Share of cached tokens to recompute; 0.3,0.16 for two check layers.",
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="value, key, key+value or random.")
    ] = None,
    check_layer: Annotated[
        list[str] | None,
        typer.Option("--check-layer", help="Layer at which tokens are selected; repeatable."),
    ] = None,
    indices: Annotated[
        str | None,
        typer.Option("--indices", help="Recompute these prompt positions instead: 40,52,60-75."),
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option("--min-tokens", help="Fewest cached tokens worth blending.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run a full prefill, and compare.")
    ] = False,
    save: Annotated[
        bool | None, typer.Option("--save/--no-save", help="Store chunks that were missing.")
    ] = None,
    strict_context: Annotated[
        bool | None,
        typer.Option(
            "--strict-context/--any-context",
            help="Use only chunks computed behind this very system prompt.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="Most tokens of the answer.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 decodes greedily, more samples.")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Nucleus to sample from.")] = None,
    sample_top_k: Annotated[
        int | None, typer.Option("--sample-top-k", help="Likeliest tokens to sample from.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of sampling, shuffling and policy random.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="A text that ends the answer; repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model: a name or a folder.")] = None,
    store: Annotated[str | None, typer.Option("--store", help="Folder of the store.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, bf16, fp16 or fp32.")] = None,
    threads: Annotated[int | None, typer.Option("--threads", help="Threads to use.")] = None,
    offline: Annotated[
        bool | None, typer.Option("--offline/--online", help="Forbid or allow the network.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Answer a question over the stored chunks, in any order.

    Without --chunk the best chunks for the question are looked up. Their stored KV is put
    together, and only the tokens that differ most from a full prefill are computed again.
    -v says where the time went, and why it wasn't less.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose)
    settings = load_settings(
        {
            "top_k": top_k,
            "order": order,
            "mode": mode,
            "ratio": ratio,
            "policy": policy,
            "check_layers": ",".join(check_layer) if check_layer else None,
            "min_tokens": min_tokens,
            "save": save,
            "strict_context": strict_context,
            "system": system,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "sample_top_k": sample_top_k,
            "seed": seed,
            "stop": stop,
            "model": model,
            "store": store,
            "device": device,
            "dtype": dtype,
            "threads": threads,
            "offline": offline,
        }
    )
    positions = None if indices is None else parse_indices(indices)
    if positions is not None and policy not in (None, "explicit"):
        raise UsageError("--indices and --policy exclude each other", "give one of them")
    text = _question(question)
    with open_existing_store(settings) as opened:
        began = time.perf_counter()
        chunks = choose_chunks(opened, settings, text, chunk or [])
        retrieve_s = time.perf_counter() - began
        began = time.perf_counter()
        blueprint = open_blueprint(settings, out)
        _ = blueprint.spec  # hashes weights that are new
        open_s = time.perf_counter() - began
        blend = blend_options(settings, positions)
        blend.check_model(blueprint.config.layers)
        _require_usable(opened, blueprint, settings, chunks)
        result = _answer(out, settings, opened, blueprint, text, chunks, blend, compare)
    timing = replace(
        result.timing,
        load_model_s=open_s + result.timing.load_model_s,
        retrieve_s=retrieve_s,
        total_s=open_s + retrieve_s + result.timing.total_s,
    )
    _report(out, replace(result, timing=timing))


def open_existing_store(settings: Settings) -> ChunkStore:
    """The store; NotFoundError, before anything is made, where there is none."""
    if not settings.store.exists():
        raise NotFoundError(
            f"there is no store at {settings.store}", "make one: cacheblend ingest PATH"
        )
    return open_store(settings)


def choose_chunks(
    store: ChunkStore, settings: Settings, question: str, given: Sequence[str]
) -> list[ChunkInfo]:
    """The chunks named, or those the question retrieves, in the order asked for.

    Raises NotFoundError for an unknown id and where nothing is found, UsageError for an id that
    several chunks begin with.
    """
    score = settings.order == "score"
    if given and not score:
        chosen = [store.catalog.chunk(name) for name in given]
    else:
        from engine.retrieval import Retriever

        chunks = [store.catalog.chunk(name) for name in given] or store.catalog.chunks()
        if not chunks:
            raise NotFoundError(
                f"the store at {settings.store} has no chunks", "fill it: cacheblend ingest PATH"
            )
        count = len(given) or settings.top_k
        chosen = [hit.chunk for hit in Retriever(chunks).search(question, count)]
        if given:  # chunks without a word in common were named all the same
            ids = {chunk.chunk_id for chunk in chosen}
            chosen += [chunk for chunk in chunks if chunk.chunk_id not in ids]
        if not chosen:
            raise NotFoundError(
                "no stored chunk has a word in common with the question",
                "use other words, or name chunks with --chunk (`cacheblend store ls` lists them)",
            )
    for chunk in chosen:
        if chunk_id(chunk.text) != chunk.chunk_id:
            raise IntegrityError(
                f"the text of chunk {chunk.chunk_id[:12]} was altered in the store",
                f"ingest {chunk.source} again",
            )
    if settings.order == "source":
        chosen.sort(key=lambda chunk: (chunk.source, chunk.ordinal))
    elif settings.order == "shuffle":
        random.Random(settings.seed).shuffle(chosen)
    return chosen


def blend_options(settings: Settings, positions: Sequence[int] | None) -> BlendOptions:
    """The settings as the engine takes them."""
    from engine.options import BlendOptions

    return BlendOptions.of(
        mode=settings.mode,
        policy=settings.policy if positions is None else "explicit",
        ratio=settings.ratio,
        check_layers=settings.check_layers,
        indices=positions,
        min_tokens=settings.min_tokens,
        seed=settings.seed,
        strict_context=settings.strict_context,
    )


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


def _question(question: str) -> str:
    """The argument, or standard input where it is `-`."""
    if question != "-":
        text = question
    elif sys.stdin is None or sys.stdin.isatty():
        raise UsageError("no question was given", "give it as an argument, or on standard input")
    else:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    if not text.strip():
        raise UsageError("the question is empty", "give it as an argument, or on standard input")
    return text.strip()


def _require_usable(
    store: ChunkStore, blueprint: Blueprint, settings: Settings, chunks: Sequence[ChunkInfo]
) -> None:
    """Refuses a store that another model filled: every chunk would be computed from scratch.

    Raises NotFoundError naming that model.
    """
    prefix, spec = blueprint.template.prefix, blueprint.spec
    encode = blueprint.tokenizer.encode
    if settings.mode == "full" or any(store.find(spec, encode(c.text), prefix) for c in chunks):
        return
    wanted = {chunk.chunk_id for chunk in chunks}
    others: set[str] = set()
    for entry in store.entries():
        if entry.spec == spec:
            return  # this model was here before; what is missing now is computed
        if entry.chunk_id in wanted:
            name = store.catalog.model_name(entry.spec.model) or entry.spec.model[:12]
            others.add(f"{name} ({entry.spec.dtype})")
    if others:
        raise NotFoundError(
            f"these chunks were ingested with {', '.join(sorted(others))}; the store has no KV of "
            f"{blueprint.name} ({blueprint.dtype}) for them",
            "ingest the documents again with this model, or use --mode full",
        )


def _answer(
    out: Output,
    settings: Settings,
    store: ChunkStore,
    blueprint: Blueprint,
    question: str,
    chunks: Sequence[ChunkInfo],
    blend: BlendOptions,
    compare: bool,
) -> AskResult:
    from engine.api import Engine
    from engine.options import SamplingOptions

    sampling = SamplingOptions(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.sample_top_k,
        seed=settings.seed,
        stop=settings.stop,
    )
    engine = Engine.load(blueprint, store=store, threads=settings.threads)
    return engine.ask(
        question,
        [engine.chunk(chunk.text, chunk.source) for chunk in chunks],
        blend=blend,
        sampling=sampling,
        compare=compare,
        save=settings.save,
        on_text=None if out.json else out.piece,
    )


def _report(out: Output, result: AskResult) -> None:
    for note in result.notes:
        out.warn(note)
    if out.json:
        out.data(result.to_json())
        return
    out.end_pieces()
    out.note(headline(result))
    if out.verbose:
        for reason in why_not_faster(result):
            out.note(reason, level=1)
