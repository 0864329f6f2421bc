"""`cacheblend calibrate`: may this model be blended here, and how much is to be recomputed?"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cache_store.errors import CacheblendError, IntegrityError, NotFoundError, UsageError
from cache_store.store import ChunkStore
from cbcli import calibrate_report, flags
from cbcli.bench_options import listed
from cbcli.calibrated import read, this_version
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.errors import Interrupted
from cbcli.eval_options import split_policies
from cbcli.output import Output
from cbcli.session import open_blueprint
from cbcli.settings import Settings, data_root, load_settings
from cbcli.units import count_text

if TYPE_CHECKING:
    from decimal import Decimal

    from cache_store.catalog import ChunkInfo
    from engine.api import Engine
    from engine.blueprint import Blueprint
    from engine.calibration.ground import Ground
    from engine.calibration.outcome import Gate
    from engine.calibration.profile import Profile, TaskProfile
    from engine.calibration.speed import Speed
    from engine.evaluation.arms import Arm
    from engine.evaluation.questions import Question

app = typer.Typer(**app_options())

TARGET_KL = 0.02  # nats, where nobody sets one
PROMPTS = 24


@app.command(
    epilog=examples(
        "cacheblend calibrate",
        "cacheblend calibrate --gate-only",
        "cacheblend calibrate --task summary --target-kl 0.01",
        "cacheblend calibrate --questions questions.jsonl --policies value,key",
        "cacheblend calibrate --device-table",
    )
)
@flags.with_settings(
    "collections",
    "task",
    "target_kl",
    "check_layers",
    flags.PROMPT,
    "seed",
    "store",
    flags.MODEL,
    "progress",
)
def calibrate(
    gate_only: Annotated[
        bool, typer.Option("--gate-only", help="Only check that blending is right.")
    ] = False,
    device_table: Annotated[
        bool,
        typer.Option("--device-table", help="Only show which storage is fast enough for a ratio."),
    ] = False,
    questions: Annotated[
        list[Path] | None,
        typer.Option("--questions", help="Measure with these, as `eval` reads them; repeatable."),
    ] = None,
    built_in: Annotated[
        bool, typer.Option("--built-in", help="Measure with built-in texts, not the store's.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", min=2, help="Most prompts to measure with.")
    ] = PROMPTS,
    policies: Annotated[
        list[str] | None,
        typer.Option("--policies", help="Those to choose from.  [default: question, value]"),
    ] = None,
    ratios: Annotated[
        str | None, typer.Option("--ratios", help="Those to measure, between 0 and 1.")
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Check that a model can be blended, and measure how much to recompute.

    First the gate: on the model's real weights, blending must compute what it should, the declared
    RoPE must fit them, and facts must be found across chunks. Then quality over ratio for every
    policy, over your questions, prompts made of stored chunks, or built-in ones. `ask` and `run`
    take policy and ratio from the result where you set neither. It is kept in the model's folder.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    if gate_only and (device_table or questions or policies or ratios):
        raise UsageError("--gate-only measures nothing else", "leave out the other flags")
    if questions and built_in:
        raise UsageError("--questions and --built-in exclude each other", "give one of them")
    settings = load_settings(options)
    given = _ratios(ratios)
    asked = _asked(questions or [])
    blueprint = open_blueprint(settings, out)
    if device_table:
        _show_table(out, settings, blueprint, given)
        return
    arms = () if gate_only else _arms(settings, blueprint, policies or [], given)
    material, prompts = (
        ("", ()) if gate_only else _prompts(settings, blueprint, asked, built_in, limit)
    )
    try:
        profile = _calibrated(out, settings, blueprint, arms, material, prompts)
    except KeyboardInterrupt as error:
        raise Interrupted(
            "interrupted: the calibration is what it was before", "run the same command again"
        ) from error
    done = None if gate_only else profile.of(settings.task, settings.context)
    calibrate_report.show(out, blueprint, profile, done)
    if profile.gate is not None and not profile.gate.passed:
        raise IntegrityError(
            f"{blueprint.name} failed the gate: {profile.gate.why}",
            "check its config.json; until it passes, ask and run blend it only with --force",
        )


def _ratios(text: str | None) -> tuple[Decimal, ...]:
    from engine.calibration.measure import RATIOS
    from engine.options import parse_ratio

    if text is None:
        return RATIOS
    found = sorted({parse_ratio(item) for item in listed("--ratios", text)})
    between = tuple(ratio for ratio in found if 0 < ratio < 1)
    if not between:
        raise UsageError(
            f"--ratios {text} has none between 0 and 1",
            "reuse and full prefill are measured anyway; give others, such as 0.1,0.3",
        )
    return between


def _asked(files: list[Path]) -> tuple[Question, ...]:
    if not files:
        return ()
    from engine.evaluation.readers import read_questions

    return read_questions(files)


def _arms(
    settings: Settings, blueprint: Blueprint, policies: list[str], ratios: tuple[Decimal, ...]
) -> tuple[Arm, ...]:
    from engine.calibration.measure import candidates, plan

    chosen = candidates(split_policies(policies) if policies else ())
    layers, origin = settings.check_layers, settings.origin("check_layers")
    if len(layers) > 1:
        raise UsageError(
            f"{origin.where or origin.kind}: {len(layers)} check layers; a calibration is at one",
            "give --check-layer once",
        )
    if origin.kind != "default" and layers[0] >= blueprint.config.layers:
        raise UsageError(
            f"check layer {layers[0]} is not in this model of {blueprint.config.layers} layers",
            f"use --check-layer 1 to {blueprint.config.layers - 1}",
        )
    arms = plan(chosen, ratios, layers, settings.context, settings.seed)
    for arm in arms:
        arm.options.check_model(blueprint.config.layers)
    return arms


def _prompts(
    settings: Settings,
    blueprint: Blueprint,
    asked: tuple[Question, ...],
    built_in: bool,
    limit: int,
) -> tuple[str, tuple[Question, ...]]:
    """What to measure with, and what that is called."""
    from engine.calibration import prompts
    from engine.evaluation.runner import check
    from engine.task import check_task

    task = check_task(settings.task)
    name, found, hint = "questions", asked[:limit], "leave that question out, or use --built-in"
    if not found and not built_in:
        name, hint = "stored chunks", "use --built-in, or --questions"
        found = prompts.of_chunks(task, _stored(settings), limit, blueprint.config.context // 2)
    if not found:
        name, hint = "built-in texts", "this model's context is too short to calibrate it"
        found = prompts.built_in(task, limit)
    try:
        check(blueprint, found, ())
    except UsageError as error:
        raise UsageError(error.message, hint) from error
    return name, found


def _stored(settings: Settings) -> list[ChunkInfo]:
    """The store's chunks, in the catalog's order; none where there is no store."""
    try:
        store = ChunkStore.open(settings.store, read_only=True)
    except NotFoundError:
        return []
    with store:
        return store.catalog.chunks(collections=settings.collections)


def _calibrated(
    out: Output,
    settings: Settings,
    blueprint: Blueprint,
    arms: tuple[Arm, ...],
    material: str,
    prompts: tuple[Question, ...],
) -> Profile:
    """Measures, and writes the profile once all of it is there. Without arms: the gate alone."""
    from engine.api import Engine
    from engine.calibration.ground import ground
    from engine.calibration.profile import Profile, Subject, places_of, write_profile
    from engine.calibration.speed_probe import measure_speed

    subject = Subject(blueprint.spec.model, blueprint.precision, blueprint.device.type)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    profile = _before(out, blueprint) or Profile(subject, this_version(), now)
    engine = Engine.load(blueprint, threads=settings.threads)
    with ground(engine) as where:
        profile = replace(profile, date=now, gate=_gate(out, where))
        if profile.passed and arms:
            out.note("measuring the speed", level=1)
            profile = replace(profile, speed=measure_speed(where, settings.store))
    if profile.passed and arms:
        task = _measured(out, settings, engine, arms, material, prompts, now)
        profile = profile.with_task(task)
    file = write_profile(profile, places_of(blueprint.path, subject.model, data_root()))
    out.note(f"kept in {file}", level=1)
    return profile


def _before(out: Output, blueprint: Blueprint) -> Profile | None:
    """What this version measured before. Another one's is not to pass for it."""
    try:
        profile = read(blueprint)
    except IntegrityError as error:
        out.warn(error.message, error.hint)
        return None
    if profile is None or profile.version == this_version():
        return profile
    out.note(f"what another version ({profile.version}) measured is left out")
    return None


def _gate(out: Output, where: Ground) -> Gate:
    from engine.calibration.gate import CHECKS, gate_checks
    from engine.calibration.outcome import Gate

    checks = []
    with out.progress("checking", unit="checks", total=CHECKS) as progress:
        progress.update(0)
        for check in gate_checks(where):
            checks.append(check)
            progress.update(len(checks), label=check.name)
    return Gate.of(checks)


def _measured(
    out: Output,
    settings: Settings,
    engine: Engine,
    arms: tuple[Arm, ...],
    material: str,
    prompts: tuple[Question, ...],
    now: str,
) -> TaskProfile:
    from engine.calibration.curve import best
    from engine.calibration.measure import fitted
    from engine.calibration.profile import TaskProfile
    from engine.context import context_kind
    from engine.evaluation.report import summarise
    from engine.evaluation.runner import evaluate, steps
    from engine.task import check_task

    total, done = len(prompts) * steps(arms), 0
    results = []
    with out.progress("measuring", unit="runs", total=total) as progress:
        progress.update(0)

        def step(text: str) -> None:
            nonlocal done
            done += 1
            progress.update(done)

        for result in evaluate(engine, prompts, arms, on_step=step):
            results.append(result)
    target = TARGET_KL if settings.target_kl is None else settings.target_kl
    found = fitted(summarise(arms, results))
    chosen = best(found, target, settings.policy)
    return TaskProfile(
        task=check_task(settings.task),
        context=context_kind(settings.context),
        policy=chosen.policy,
        ratio=chosen.ratio_for(target),
        target_kl=target,
        curves=found,
        material=material,
        prompts=len(results),
        tokens=sum(result.tokens for result in results) / len(results),
        date=now,
    )


def _show_table(
    out: Output, settings: Settings, blueprint: Blueprint, ratios: tuple[Decimal, ...]
) -> None:
    profile = _before(out, blueprint)
    speed = profile.speed if profile else None
    if speed is None or not speed.holds(blueprint.device, settings.threads):
        speed = _speed(out, settings, blueprint)
    calibrate_report.show_table(out, blueprint, speed, ratios)


def _speed(out: Output, settings: Settings, blueprint: Blueprint) -> Speed:
    from engine.api import Engine
    from engine.calibration.ground import ground
    from engine.calibration.speed_probe import measure_speed

    out.note("measuring the speed")
    engine = Engine.load(blueprint, threads=settings.threads)
    try:
        with ground(engine) as where:
            return measure_speed(where, settings.store)
    except OSError as error:
        raise CacheblendError(
            f"the speed could not be measured: {error.strerror or error}",
            f"it takes {count_text(1, 'store')} in the folder for temporary files (TMPDIR)",
        ) from error
