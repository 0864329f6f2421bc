"""`cacheblend doctor`: what works on this machine, and what to do about what doesn't."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cache_store.errors import CacheblendError
from cbcli import checks, flags
from cbcli.calibration_check import check_calibration
from cbcli.checks import Check, examine
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.errors import ExitCode
from cbcli.output import Output
from cbcli.remote_check import check_remote
from cbcli.settings import DECLARED, Origin, Settings, default_of, load_settings, read_value
from cbcli.usage_checks import check_documents, check_retriever, check_terminal
from cbcli.vllm_check import check_vllm

if TYPE_CHECKING:
    from engine.probe import Probe

app = typer.Typer(**app_options())

STYLES = {"ok": "", "warn": "yellow", "fail": "red"}


@app.command(epilog=examples("cacheblend doctor", "cacheblend doctor --no-probe --json"))
@flags.with_settings("store", flags.MODEL, without=("kv_dtype", "offline"))
def doctor(
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Measure how fast this machine is.")
    ] = True,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Check the installation, the settings, the machine, the store and the models.

    Every check is ok, warn or fail, with what to do about it; the exit code is 1 where one
    failed. Nothing is changed, made or downloaded.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    settings = _settings(options)
    probes: list[Probe] = []
    found: list[Check] = []
    for check in _examined(settings, probes.append, measured=probe):
        if check.name == "python" and any(c.state == "fail" for c in found):
            out.note("settings are wrong: the rest is checked with the defaults")
        found.append(check)
        if not json:
            _show(out, check)
    failed = any(check.state == "fail" for check in found)
    if json:
        figures = probes[0].to_json() if probes else None
        out.data({"ok": not failed, "checks": [asdict(c) for c in found], "probe": figures})
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _settings(given: Mapping[str, object]) -> Settings:
    """The settings; where a file or the environment is wrong, which is checked apart, the
    defaults under the flags. Raises UsageError for a flag that is wrong."""
    flags_given = {
        name: read_value(name, item, Origin("flag", DECLARED[name].flag), Path.cwd())
        for name, item in given.items()
        if item is not None
    }
    try:
        return load_settings(given)
    except CacheblendError:
        defaults = {name: default_of(setting) for name, setting in DECLARED.items()}
        return Settings(**cast(dict[str, Any], defaults | flags_given))


def _examined(
    settings: Settings, keep: Callable[[Probe], None], *, measured: bool
) -> Iterator[Check]:
    yield from examine("settings", checks.check_settings)
    yield from examine("python", checks.check_python)
    torch = list(examine("torch", checks.check_torch))
    yield from torch
    yield from examine("optional", checks.check_pieces)
    yield from examine("vllm", partial(check_vllm, settings, thorough=measured))
    yield from examine("documents", check_documents)
    yield from examine("cpu", checks.check_cpu)
    yield from examine("memory", checks.check_memory)
    computes = all(check.state != "fail" for check in torch)
    if computes:
        yield from examine("threads", partial(checks.check_threads, settings))
        yield from examine("device", partial(checks.check_device, settings))
    yield from examine("store", partial(checks.check_store, settings))
    yield from examine("remote", partial(check_remote, settings))
    yield from examine("disk", partial(checks.check_disk, settings))
    yield from examine("retriever", partial(check_retriever, settings))
    yield from examine("models", partial(checks.check_models, settings))
    yield from examine("model", partial(checks.check_model, settings))
    if computes:
        yield from examine("calibration", partial(check_calibration, settings))
    yield from examine("terminal", check_terminal)
    config = checks.model_config(settings) if measured and computes else None
    if config is not None:
        yield from examine("speed", partial(checks.check_speed, settings, config, keep))


def _show(out: Output, check: Check) -> None:
    out.line(f"{check.state:4}  {check.name:12}  {check.found}", style=STYLES[check.state])
    if check.hint:
        out.line(f"{'':20}{check.hint}")
