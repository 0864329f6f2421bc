"""`cacheblend serve`: vLLM's OpenAI-compatible server over the store."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from cache_store.errors import UsageError
from cbcli import flags
from cbcli.calibrated import Calibrated, PromptTokens
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.output import Output
from cbcli.session import FINGERPRINTS, blend_options, open_blueprint, open_store, warn_of_faults
from cbcli.settings import Settings, data_root, load_settings
from cbcli.text import one_line
from cbcli.values import AUTO

if TYPE_CHECKING:
    from engine.blueprint import Blueprint
    from engine.options import BlendOptions
    from engine.vllm.server import Ready, ServerPlan

app = typer.Typer(**app_options())
_THROUGH = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
_TYPICAL = 4096  # tokens of a prompt that a calibrated ratio is looked up for


@app.command(
    context_settings=_THROUGH,
    epilog=examples(
        "cacheblend serve",
        "cacheblend serve qwen3-0.6b --port 8080 --ratio 0.1",
        "cacheblend serve ./my-model --host 0.0.0.0 -- --tensor-parallel-size 2",
        "cacheblend serve -- --help=all",
    ),
)
@flags.with_settings(
    "host",
    "port",
    "text_separator",
    flags.BLEND,
    flags.PROMPT,
    flags.STORE,
    "memory_limit",
    flags.MODEL,
    without=("loader", "model", "device", "threads"),
)
def serve(
    model_and_flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="A name or a folder. Flags that are not below, and all behind --, are vLLM's.",
            show_default=False,
        ),
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Serve a model with vLLM, reusing the chunks in the store.

    The API is OpenAI's. A chat completion may have a list of documents, each named by chunk id,
    document or text; a prompt may have separators between its chunks. What is new is stored after
    the answer. Needs vLLM: pip install 'cacheblend[vllm]'. With --json, one line on stdout says
    when the server answers, and where.
    """
    model, extra = _split(model_and_flags or [])
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = load_settings({**options, "model": model})
    if settings.ratio == AUTO:
        raise UsageError("ratio auto is not for a server", "give a ratio, or --target-kl")
    if settings.policy == "explicit":
        raise UsageError("policy explicit takes the positions of one prompt", "use it with `ask`")
    from engine.vllm.server import bind, check_extra
    from engine.vllm.server import serve as run

    check_extra(extra)
    _require_vllm()
    sock = bind(settings.host, settings.port)
    with sock, _stdout_kept() as data:
        out = Output(json=json, quiet=quiet, verbose=verbose, stdout=data)
        blueprint = open_blueprint(settings, out)
        plan = _plan(settings, blueprint, extra, out, quiet=quiet)
        out.note(f"starting vLLM with {one_line(blueprint.name)} …")
        run(plan, sock, lambda ready: _say_ready(out, settings, plan, ready))
    out.note("stopped")


def _split(given: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The model, where one is named, and vLLM's flags."""
    if given and not given[0].startswith("-"):
        return given[0], tuple(given[1:])
    return None, tuple(given)


def _require_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(
            "serve needs vLLM, which is not installed",
            "pip install 'cacheblend[vllm]', or see the README on machines without a GPU",
        )


def _plan(
    settings: Settings,
    blueprint: Blueprint,
    extra: tuple[str, ...],
    out: Output,
    *,
    quiet: bool,
) -> ServerPlan:
    from engine.vllm.server import ServerPlan

    calibrated = Calibrated.open(blueprint, out)
    chosen = calibrated.settle(settings, PromptTokens(_TYPICAL, _TYPICAL, 0))
    options = blend_options(chosen)
    options.check_model(blueprint.config.layers)
    with open_store(settings, on_damage="go_on") as store:  # made where there is none
        warn_of_faults(store, out)
        place = store.path
    return ServerPlan(
        blueprint=blueprint,
        host=settings.host,
        port=settings.port,
        connector=_connector(settings, blueprint, options, place),
        separator=settings.separator,
        template_date=settings.template_date,
        extra=extra,
        log="ERROR" if quiet else "INFO" if out.verbose else "WARNING",
    )


def _connector(
    settings: Settings, blueprint: Blueprint, options: BlendOptions, store: Path
) -> dict[str, Any]:
    """What the connector is told; see `engine.vllm.settings`."""
    told: dict[str, Any] = {
        "store": str(store),
        "model": str(Path(blueprint.path).absolute()),
        "name": blueprint.name,
        "mode": options.mode,
        "policy": options.policy,
        "check_layers": list(options.check_layers),
        "min_tokens": options.min_tokens,
        "strict_context": options.strict_context,
        "seed": options.seed,
        "separator": settings.text_separator,
        "context": settings.context,
        "kv_dtype": blueprint.kv_dtype,
        "save": settings.save,
        "audit": settings.audit,
        "task": settings.task,
        "template_date": settings.template_date,
        "fingerprints": str(data_root() / FINGERPRINTS),
        "remote_timeout": settings.remote_timeout,
        "memory_limit": settings.memory_limit,
        "remote": settings.remote or "none",
    }
    if options.threshold is None:
        told["ratio"] = [str(ratio) for ratio in options.ratios]
    else:
        told["threshold"] = str(options.threshold)
    for name, value in (("transfer", options.transfer), ("system", settings.system)):
        if value is not None:
            told[name] = value
    return told


def _say_ready(out: Output, settings: Settings, plan: ServerPlan, ready: Ready) -> None:
    shown = f"[{ready.host}]" if ":" in ready.host else ready.host
    url = f"http://{shown}:{ready.port}"
    if out.json:
        out.data(
            {
                "host": ready.host,
                "port": ready.port,
                "url": url,
                "model": ready.name,
                "store": plan.connector["store"],
                "vllm": ready.vllm,
                "blending": ready.off is None,
                "why": ready.off,
            }
        )
    if ready.off is not None:
        out.warn(f"blending is off: {one_line(ready.off)}", "prompts are computed as without it")
    out.note(f"{one_line(ready.name)} answers at {url}/v1 (Ctrl-C ends it)")


class _stdout_kept:
    """Within, whatever prints to standard output, processes started here too, goes to standard
    error; the stream that comes out is the real one, for data."""

    def __enter__(self) -> TextIO | None:
        self._kept: int | None = None
        try:
            sys.stdout.flush()
            kept = os.dup(1)
            os.dup2(2, 1)
        except OSError:  # closed
            return None
        self._kept = kept
        return os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="backslashreplace")

    def __exit__(self, *ended: object) -> None:
        if self._kept is not None:
            sys.stdout.flush()
            os.dup2(self._kept, 1)
            os.close(self._kept)
