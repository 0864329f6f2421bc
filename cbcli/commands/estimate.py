"""`cacheblend store estimate`: what KV will take, and how soon prompts over it will answer."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_store.errors import CacheblendError, NotFoundError, UsageError
from cache_store.place import default_limit
from cache_store.store import ChunkStore
from cbcli import flags
from cbcli.command import Json, Quiet, Verbose, examples
from cbcli.estimate_report import Figures, Material, Subject, show
from cbcli.file_choice import FilesFrom, Null, chosen_files, read_all
from cbcli.ingest_report import name_skipped, skipped_line
from cbcli.output import Output
from cbcli.session import model_folder, open_blueprint, shown_source
from cbcli.settings import Settings, load_settings

if TYPE_CHECKING:
    from engine.documents import Found
    from engine.probe import Probe
    from engine.trial import PromptShape

PREFIX, SUFFIX = 32, 24  # tokens, where a model's template isn't known
QUESTION = "What do the documents say about this, and since when?"
EXAMPLES = examples(
    "cacheblend store estimate notes/",
    "cacheblend store estimate --tokens 1000000 --ratio 0.16,0.05",
    "cacheblend store estimate --config mistral-7b/config.json --dtype bf16 --no-probe",
)


@flags.with_settings(
    flags.FILES,
    "collections",
    flags.CHUNKING,
    "top_k",
    "ratio",
    "policy",
    "check_layers",
    "system",
    "store",
    flags.MODEL,
)
def estimate(
    paths: Annotated[
        list[str] | None, typer.Argument(help="Files and folders, read as ingest would.")
    ] = None,
    files_from: FilesFrom = None,
    null: Null = False,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="So many tokens instead of documents.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A config.json: a model known by its shape alone."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Measure this machine, or give sizes only.")
    ] = True,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Estimate the bytes of KV, and the time to the first token on this machine.

    For documents, for so many tokens, or for what the store holds. Sizes follow from the model's
    shape; times from a probe of two or three seconds, in which nothing is stored and no weights
    are needed. A model that isn't here can be given by its config.json.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    named = bool(paths) or files_from is not None
    if named and tokens:
        raise UsageError("documents and --tokens were given", "give one of the two")
    found = chosen_files(settings, paths or [], files_from=files_from, null=null) if named else None
    subject = _subject(out, settings, config)
    material = _material(out, settings, subject, found, tokens)
    shape = _prompt(settings, subject, material)
    measured = _measured(out, settings, subject, shape) if probe else None
    figures = Figures.of(settings, subject, material, shape, measured, _limit(settings))
    show(out, figures)


def _subject(out: Output, settings: Settings, file: Path | None) -> Subject:
    from engine.codec import choose_kv_dtype
    from engine.config import load_config, parse_config
    from engine.model import choose_device, choose_dtype

    device = choose_device(settings.device)
    if file is None:
        folder = model_folder(settings, out)
        if (folder / "tokenizer.json").is_file():
            b = open_blueprint(settings, out)
            suffix = len(b.template.suffix(QUESTION))
            prefix, separator = len(b.template.prefix), len(b.template.separator)
            return Subject(
                b.name, b.config, b.dtype, b.kv_dtype, device, prefix, separator, suffix, b
            )
        config, name = load_config(folder), folder.name
    else:
        config, name = parse_config(_read_json(file), where=str(file)), str(file)
    dtype = choose_dtype(settings.dtype, config.dtype, device)
    kv_dtype = choose_kv_dtype(settings.kv_dtype, dtype)
    return Subject(name, config, dtype, kv_dtype, device, PREFIX, 0, SUFFIX, None)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json_module.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"{file}: no such file", "give a model's config.json") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise UsageError(f"{file}: a JSON object is expected", "give a model's config.json")
    return raw


def _material(
    out: Output,
    settings: Settings,
    subject: Subject,
    found: Iterator[Found] | None,
    tokens: int | None,
) -> Material:
    size = settings.chunk_tokens
    if tokens is not None:
        whole, rest = divmod(tokens, size)
        return Material("tokens", 0, (size,) * whole + ((rest,) if rest else ()))
    if found is not None:
        return _cut(out, settings, subject, found)
    try:
        store = ChunkStore.open(settings.store, read_only=True)
    except NotFoundError:
        return Material("", 0, ())
    names = settings.collections
    with store:
        known = {c.chunk_id: c.tokens for c in store.catalog.chunks(collections=names)}
        documents = store.catalog.documents(collections=names)
        return Material("store", len(documents), tuple(known.values()))


def _cut(out: Output, settings: Settings, subject: Subject, found: Iterator[Found]) -> Material:
    """What `ingest` would cut these files into; equal chunks count once."""
    from engine.chunking import Cutting
    from engine.documents import Skipped, Unreadable

    if subject.blueprint is None:
        raise UsageError(
            f"{subject.name} has no tokenizer to count the documents' tokens with",
            "give --tokens instead of documents, or a --model with its tokenizer.json",
        )
    tokenizer = subject.blueprint.tokenizer
    cutting = Cutting(settings.chunk_tokens, settings.overlap, settings.headings)
    documents = 0
    skipped: list[Skipped] = []
    sizes: dict[str, int] = {}
    for item in read_all(out, settings, found):
        if isinstance(item, Unreadable):
            out.warn(f"{shown_source(item.source)}: {item.reason}", "left out")
        elif isinstance(item, Skipped):
            skipped.append(item)
        else:
            documents += 1
            cut = cutting.cut(item, tokenizer)
            sizes |= {chunk.chunk_id: len(chunk.token_ids) for chunk in cut}
    if skipped:
        out.note(skipped_line(skipped) + ("" if out.verbose else " (-v names them)"))
        name_skipped(out, skipped)
    if not sizes:
        out.warn("no text was found in what was named", "give documents, or --tokens")
    return Material("paths", documents, tuple(sizes.values()))


def _prompt(settings: Settings, subject: Subject, material: Material) -> PromptShape:
    """A prompt of `top_k` chunks, as long as those there are on average, or of as many as the
    model takes. Raises UsageError where it doesn't take one."""
    from engine.trial import PromptShape

    count, size = settings.top_k, settings.chunk_tokens
    if material.chunks:
        count = min(count, len(material.chunks))
        size = math.ceil(sum(material.chunks) / len(material.chunks))
    room = subject.config.context - subject.prefix - subject.suffix + subject.separator - 1
    fitting = room // (size + subject.separator)
    if fitting < 1:
        raise UsageError(
            f"a prompt with a chunk of {size} tokens does not fit {subject.name}'s context of "
            f"{subject.config.context}",
            "use a smaller --chunk-tokens",
        )
    count = min(count, fitting)
    return PromptShape(subject.prefix, count, size, subject.separator, subject.suffix)


def _measured(out: Output, settings: Settings, subject: Subject, shape: PromptShape) -> Probe:
    from engine.probe import probe

    out.note("probing this machine", level=1)
    return probe(
        subject.config,
        subject.device,
        subject.dtype,
        settings.store,
        kv_dtype=subject.kv_dtype,
        shape=shape,
        threads=settings.threads,
    )


def _limit(settings: Settings) -> int:
    """The size limit of the store there is, or of the one that would be made."""
    try:
        with ChunkStore.open(settings.store, read_only=True) as store:
            return store.limit
    except CacheblendError:  # none, or one that `doctor` has more to say about
        return settings.limit or default_limit(settings.store)
