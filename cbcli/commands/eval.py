"""`cacheblend eval`: how close answers stay to a full prefill's, over a file of questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_store.errors import UsageError
from cbcli import eval_report, flags
from cbcli.bench_options import check_files
from cbcli.command import Json, Quiet, Verbose, app_options, examples
from cbcli.errors import Interrupted
from cbcli.eval_options import plan, split_policies
from cbcli.output import Output
from cbcli.progress import Progress
from cbcli.session import check_engine, load_engine, open_blueprint
from cbcli.settings import Settings, load_settings
from cbcli.units import count_text

if TYPE_CHECKING:
    from engine.bench.conditions import Conditions
    from engine.blueprint import Blueprint
    from engine.evaluation.arms import Arm
    from engine.evaluation.metrics import Metric
    from engine.evaluation.questions import Question
    from engine.evaluation.report import Report
    from engine.evaluation.runner import QuestionResult

app = typer.Typer(**app_options())

RATIOS = "0,0.05,0.1,0.16,0.3,0.5,1"
MAX_TOKENS = {"f1": 32, "rouge-l": 128}  # as the CacheBlend authors answer


@dataclass(frozen=True)
class Task:
    """What is to be evaluated. everything: the questions as they were read; questions: those that
    are asked, as they are asked; given: settings in the user's words."""

    files: tuple[Path, ...]
    everything: tuple[Question, ...]
    questions: tuple[Question, ...]
    shuffle: int | None
    arms: tuple[Arm, ...]
    tokens: int
    metric: Metric | None
    max_tokens: int | None
    given: dict[str, Any]


@app.command(
    epilog=examples(
        "cacheblend eval musique_dev.json --passages 4 --shuffle-chunks 1 --limit 20",
        "cacheblend eval questions.jsonl --policies value,key --check-layer 1,2,8 --no-answers",
        "cacheblend eval questions.jsonl --state eval.jsonl --plot quality.svg --csv rows.csv",
    )
)
@flags.with_settings("loader", "system", "seed", flags.MODEL, flags.ENGINE, "progress")
def evaluate(
    file: Annotated[
        list[Path], typer.Argument(help="Questions with passages: JSON or JSONL; several files.")
    ],
    passages: Annotated[
        int | None, typer.Option("--passages", min=1, help="Only so many of each question's.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only so many questions.")
    ] = None,
    shuffle_chunks: Annotated[
        int | None,
        typer.Option("--shuffle-chunks", metavar="SEED", help="Shuffle each question's passages."),
    ] = None,
    modes: Annotated[
        str, typer.Option("--modes", help="Of blend and prefix; full and reuse are always there.")
    ] = "blend",
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policies",
            help="What selects tokens; repeatable.  [default: the setting's policy and value]",
        ),
    ] = None,
    ratios: Annotated[
        str, typer.Option("--ratios", help="Shares of cached tokens to recompute.")
    ] = RATIOS,
    check_layer: Annotated[
        str, typer.Option("--check-layer", help="Layers to select at, each by itself.")
    ] = "1",
    contexts: Annotated[
        str | None,
        typer.Option(
            "--contexts",
            help="What chunks are computed behind: prefix, bos, none.  [default: as set]",
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random/--no-random", help="Policy random beside the others.")
    ] = True,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=1024, help="Answer tokens that are compared.")
    ] = 16,
    answers: Annotated[
        bool, typer.Option("--answers/--no-answers", help="Let every way answer, and score that.")
    ] = True,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="f1 or rouge-l.  [default: what fits the questions]"),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", "-n", min=1, help="Most tokens of an answer.  [default: 32, or 128]"
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="Keep results in this file, and go on from what it holds."),
    ] = None,
    csv: Annotated[
        str | None, typer.Option("--csv", metavar="FILE", help="Write rows as CSV; - prints them.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the figures: a .svg, .png or .pdf file.")
    ] = None,
    options: flags.Options = flags.NONE,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Measure how close answers stay to a full prefill's, and how much sooner they come.

    Every question is asked in all ways: full prefill, reuse, and each policy at each ratio. KL and
    top-1 agreement are along full prefill's own answer; F1 or ROUGE-L where the file has answers.
    Chunks' KV is kept in a temporary folder, one question at a time; no store is used or changed.
    """
    out = Output(json=json, quiet=quiet, verbose=verbose, options=options)
    check_files(out, csv, plot, eval_report.FORMATS)
    settings = load_settings(options)
    check_engine(settings)
    _check_state(state, file)
    chosen = split_policies(policies or [settings.policy, "value"])
    given = {
        "modes": modes,
        "policies": list(chosen),
        "ratios": ratios,
        "check layer": check_layer,
        "contexts": contexts or settings.context,
        "random": random,
        "loader": settings.loader,
        "seed": settings.seed,
        "passages": passages,
        "shuffle-chunks": shuffle_chunks,
        "tokens": tokens,
    }
    task = _task(file, given, limit, answers, metric, max_tokens)
    report = _run(out, settings, task, state)
    eval_report.show(out, report, csv)
    if plot is not None:
        from cbcli.eval_plot import draw

        draw(report, plot)
        out.note(f"drew {plot}")


def _check_state(state: Path | None, files: Sequence[Path]) -> None:
    if state is None:
        return
    if not state.absolute().parent.is_dir():
        raise UsageError(f"--state {state}: there is no such folder", "make it first")
    if any(path.exists() and state.exists() and path.samefile(state) for path in files):
        raise UsageError(f"{state} holds the questions", "name another file with --state")


def _task(
    files: Sequence[Path],
    given: dict[str, Any],
    limit: int | None,
    answers: bool,
    metric: str | None,
    max_tokens: int | None,
) -> Task:
    """Reads the questions, and checks all that can be without a model."""
    from engine.evaluation.metrics import choose_metric
    from engine.evaluation.questions import prepare
    from engine.evaluation.readers import read_questions

    if not answers and (metric is not None or max_tokens is not None):
        flag = "--metric" if metric is not None else "--max-tokens"
        raise UsageError(f"{flag} is of answers, and --no-answers makes none", "give one of them")
    everything = read_questions(files)
    questions = prepare(
        everything,
        limit=limit,
        passages=given["passages"],
        shuffle=given["shuffle-chunks"],
    )
    scored = choose_metric(everything, metric) if answers else None
    most = None if scored is None else max_tokens or MAX_TOKENS[scored]
    arms = plan(
        modes=given["modes"],
        policies=given["policies"],
        ratios=given["ratios"],
        check_layers=given["check layer"],
        contexts=given["contexts"],
        seed=given["seed"],
        random=given["random"],
        loader=given["loader"],
    )
    given = given | {"metric": scored, "max tokens": most}
    return Task(
        tuple(files),
        everything,
        questions,
        given["shuffle-chunks"],
        arms,
        given["tokens"],
        scored,
        most,
        given,
    )


def _run(out: Output, settings: Settings, task: Task, state: Path | None) -> Report:
    blueprint = open_blueprint(settings, out)
    from engine.evaluation.runner import check
    from engine.threads import set_threads

    check(blueprint, task.questions, task.arms)
    set_threads(settings.threads)
    done: list[QuestionResult] = []
    with ExitStack() as stack:
        file = None
        if state is not None:
            from engine.evaluation.state import StateFile

            deciding = _deciding(blueprint, task)
            if settings.engine != "torch":
                deciding["engine"] = settings.engine
            file = stack.enter_context(StateFile(state, deciding))
            done += file.results[: len(task.questions)]
            if done:
                out.note(f"{count_text(len(done), 'questions')} kept from {state}")
        from engine.bench.conditions import look_around

        conditions = look_around(blueprint.device)
        progress = stack.enter_context(out.progress("evaluating", unit="runs"))
        try:
            results = _results(stack, out, settings, blueprint, task, len(done), progress)
            for result in results:
                done.append(result)
                if file is not None:
                    file.append(result)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted: {len(done)} of {count_text(len(task.questions), 'questions')} done",
                "the same command goes on from there"
                if state is not None
                else "with --state FILE the next one could go on from there",
            ) from error
    return _report(blueprint, task, conditions, done, settings.engine)


def _results(
    stack: ExitStack,
    out: Output,
    settings: Settings,
    blueprint: Blueprint,
    task: Task,
    first: int,
    progress: Progress,
) -> Iterator[QuestionResult]:
    """Results of what is left to do; where nothing is, the weights aren't read."""
    if first >= len(task.questions):
        return iter(())
    from engine.evaluation.runner import evaluate, prompt_of, steps

    longest = max(len(prompt_of(blueprint, question).token_ids) for question in task.questions)
    room = max(task.tokens, task.max_tokens or 1) + 1
    engine = stack.enter_context(
        load_engine(settings, blueprint, None, longest=longest + room, out=out)
    )
    done = 0

    def step(text: str) -> None:
        nonlocal done
        done += 1
        progress.update(done, label=text.partition(": ")[0])

    total = (len(task.questions) - first) * steps(task.arms)
    progress.update(0, total=total)
    return evaluate(
        engine,
        task.questions,
        task.arms,
        tokens=task.tokens,
        metric=task.metric,
        max_tokens=task.max_tokens or 1,
        first=first,
        on_step=step,
    )


def _deciding(blueprint: Blueprint, task: Task) -> dict[str, Any]:
    """All that the results depend on; not how many questions, so that more can be asked later."""
    from importlib import metadata

    import torch
    from blake3 import blake3

    from engine.evaluation.questions import digest

    template = blueprint.template
    prompt = [template.prefix, template.separator, template.suffix("?")]
    return {
        "questions": digest(task.everything),
        "model": blueprint.spec.model,
        "dtype": blueprint.precision,
        "device": str(blueprint.device),
        "threads": torch.get_num_threads(),
        "cacheblend": metadata.version("cacheblend"),
        "torch": torch.__version__,
        "prompt": blake3(repr(prompt).encode()).hexdigest()[:32],
        **task.given,
        "arms": [arm.key for arm in task.arms],
    }


def _report(
    blueprint: Blueprint,
    task: Task,
    conditions: Conditions,
    done: Sequence[QuestionResult],
    engine: str,
) -> Report:
    from engine.evaluation.questions import digest
    from engine.evaluation.report import Data, Report, summarise
    from engine.results import ModelInfo

    sizes = [len(question.passages) for question in task.questions]
    return Report(
        model=ModelInfo(
            blueprint.name,
            blueprint.spec.model,
            blueprint.dtype,
            blueprint.kv_dtype,
            str(blueprint.device),
        ),
        conditions=conditions,
        data=Data(
            files=tuple(map(str, task.files)),
            digest=digest(task.everything),
            questions=len(done),
            passages=(min(sizes), max(sizes)),
            shuffle=task.shuffle,
            tokens=sum(result.tokens for result in done) / len(done),
        ),
        forced_tokens=task.tokens,
        metric=task.metric,
        max_tokens=task.max_tokens,
        rows=summarise(task.arms, done),
        engine=engine,
    )
