"""`cacheblend models`: get, list, check and remove models."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cache_store.errors import UsageError
from cbcli import completion, flags
from cbcli.command import Group, Json, Quiet, Verbose, app_options, examples
from cbcli.errors import ExitCode
from cbcli.fields import BYTES, count_or_none
from cbcli.listing import Field, Fields, Jsonl, ListForm, Listing, QuietIds
from cbcli.output import Output
from cbcli.settings import load_settings
from cbcli.units import count_text, size_text
from engine import library

app = typer.Typer(
    cls=Group,
    **app_options(),
    help="Get, list, check and remove models.",
    epilog=examples(f"cacheblend models pull {library.DEFAULT}", "cacheblend models ls"),
)

MODELS = Listing(
    "models",
    "name",
    (
        Field("name"),
        Field("path", column=False),
        Field("architecture", show=lambda name: name or "?"),
        Field("parameters", show=count_or_none, right=True, column=False),
        Field("layers", right=True),
        Field("heads", right=True, column=False),
        Field("kv_heads", right=True, column=False),
        Field("head_dim", right=True, column=False),
        Field("hidden", right=True, column=False),
        Field("vocab", show=count_or_none, right=True, column=False),
        Field("context", show=count_or_none, right=True),
        Field("rope", column=False),
        Field("dtype"),
        BYTES,
        Field("licence"),
        Field("terms", column=False),
        Field("origin", column=False),
        Field("revision", column=False),
        Field("pulled_at", column=False),
        Field("converted", column=False),
        Field("problem", column=False),
    ),
)

Name = Annotated[
    str,
    typer.Argument(
        autocompletion=completion.models, help="A model's name, as `models ls` shows it."
    ),
]


@app.command(
    epilog=examples(
        f"cacheblend models pull {library.DEFAULT}",
        "cacheblend models pull HuggingFaceTB/SmolLM2-360M-Instruct",
        "cacheblend models pull ~/models/my-model --name mine",
        "cacheblend models pull model.Q8_0.gguf",
    )
)
@flags.with_settings("offline", "models_dir", "progress")
def pull(
    source: Annotated[
        str,
        typer.Argument(
            help=f"A known name ({', '.join(library.CATALOGUE)}), a Hugging Face id "
            "owner/name[@revision], a folder or a .gguf file.",
        ),
    ],
    name: Annotated[str | None, typer.Option("--name", help="What to call it here.")] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Get a model and check it.

    It is downloaded, or copied from a folder, or converted from a GGUF file."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    with showing(out, f"model {name or source}") as progress:
        path = library.pull(
            source,
            settings.models_dir,
            name=name,
            offline=settings.offline,
            progress=progress,
            say=out.note,
        )
    info = library.show(path.name, settings.models_dir)
    if json:
        out.data(_described(info))
    else:
        out.line(f"{info.name}  {path}")


@app.command(
    "ls", epilog=examples("cacheblend models ls", "cacheblend models ls --fields name,path")
)
@flags.with_settings("models_dir", "pager")
def list_models(
    options: flags.Options = flags.NONE,
    json: Json = False,
    jsonl: Jsonl = False,
    fields: Fields = None,
    quiet: QuietIds = False,
    verbose: Verbose = 0,
) -> None:
    """List the models that are here."""
    out = Output(
        json=json, quiet=quiet, verbose=verbose, form=ListForm(jsonl, fields), options=options
    )
    settings = load_settings(options)
    found = library.ls(settings.models_dir)
    folder = str(settings.models_dir)
    if found or out.json:
        records = [_described(info) for info in found]
        out.list(MODELS, records, around=lambda models: {"models_dir": folder, "models": models})
    if out.json:
        return
    for info in found:
        if info.problem:
            out.warn(f"{info.name}: {info.problem}", f"see `cacheblend models check {info.name}`")
    missing = [name for name in library.CATALOGUE if name not in {info.name for info in found}]
    if not found:
        out.note(f"no models in {settings.models_dir}")
    for name in missing:
        out.note(f"{library.CATALOGUE[name].about}: `cacheblend models pull {name}` gets it")


@app.command(epilog=examples(f"cacheblend models show {library.DEFAULT}"))
@flags.with_settings("models_dir")
def show(
    name: Name,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Show what is known about a model."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    info = library.show(name, settings.models_dir)
    described = _described(info)
    if json:
        out.data(described)
        return
    known = {key: value for key, value in described.items() if value}
    out.pairs((key.replace("_", " "), _shown(key, value)) for key, value in known.items())


@app.command(epilog=examples(f"cacheblend models check {library.DEFAULT}"))
@flags.with_settings("models_dir", "progress")
def check(
    name: Annotated[
        str | None,
        typer.Argument(autocompletion=completion.models, help="A model's name; all without one."),
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Check that models are as they were pulled.

    Every file's hash is compared with the recorded one; exit code 4 where one differs."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    names = [name] if name else [info.name for info in library.ls(settings.models_dir)]
    reports = []
    for each in names:
        with showing(out, f"model {each}") as progress:
            reports.append(library.check(each, settings.models_dir, progress))
        if not json:
            report = reports[-1]
            out.line(f"{report.name}: {report.files} files, {size_text(report.nbytes)}, all sound")
    if json:
        out.data(
            {"checked": [{"name": r.name, "files": r.files, "bytes": r.nbytes} for r in reports]}
        )


@app.command(epilog=examples(f"cacheblend models rm {library.DEFAULT}"))
@flags.with_settings("models_dir")
def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Remove a model.

    The chunks stored with it stay in the store."""
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings(options)
    info = library.show(name, settings.models_dir)
    if not yes:
        _confirm(f"Remove {info.name} ({size_text(info.nbytes)})?")
    freed = library.rm(name, settings.models_dir)
    if json:
        out.data({"removed": name, "bytes_freed": freed})
    else:
        out.line(f"removed {name}, {size_text(freed)} freed")


class showing:
    """The library's progress, shown by `out` under a label, as a context manager."""

    def __init__(self, out: Output, label: str) -> None:
        self._progress = out.progress(label, unit="bytes")
        self._label = label
        self._stage = ""

    def __enter__(self) -> Callable[[str, int, int | None], None]:
        self._progress.__enter__()
        return self._update

    def __exit__(self, *exc: Any) -> None:
        self._progress.__exit__(*exc)

    def _update(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._stage = stage
            self._progress.restart(f"{self._label}: {stage}")
        self._progress.update(done, total=total)


def _confirm(question: str) -> None:
    if not _at_terminal():
        raise UsageError("there is nobody to ask for consent", "add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(ExitCode.FAILED)


def _at_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _described(info: library.ModelInfo) -> dict[str, Any]:
    """What `--json` says about a model; sizes in bytes, lengths in tokens."""
    config, manifest = info.config, info.manifest
    described: dict[str, Any] = {item.key: None for item in MODELS.fields}
    described |= {"name": info.name, "path": str(info.path), "bytes": info.nbytes}
    if config:
        described |= {
            "architecture": config.architecture,
            "parameters": info.parameters,
            "layers": config.layers,
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "hidden": config.hidden,
            "vocab": config.vocab,
            "context": config.context,
            "rope": config.rope.type,
            "dtype": config.dtype,
        }
    if manifest:
        described |= {
            "licence": manifest.licence,
            "terms": manifest.terms,
            "origin": manifest.origin,
            "revision": manifest.revision,
            "pulled_at": manifest.pulled_at,
            "converted": dict(manifest.converted),
        }
    return described | {"problem": info.problem}


def _shown(key: str, value: object) -> str:
    if key == "bytes" and isinstance(value, int):
        return size_text(value)
    if isinstance(value, int):
        return count_text(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
