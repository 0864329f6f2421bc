"""Lines answered one by one with one model and one store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cache_store.catalog import ChunkInfo
from cache_store.errors import CacheblendError, IntegrityError
from cache_store.keys import chunk_id
from cache_store.store import ChunkStore
from cbcli.calibrated import Calibrated, PromptTokens, without_auto
from cbcli.changes import ChangeWatch
from cbcli.chooser import Chooser, in_order
from cbcli.citations import Citations
from cbcli.errors import Failure, describe
from cbcli.lines.prompts import BadLine, LineName, PromptLine
from cbcli.output import Output
from cbcli.present import remember
from cbcli.session import (
    audit_of,
    blend_options,
    check_ratio,
    lines_together,
    load_engine,
    open_blueprint,
    open_store,
    sampling_options,
    warn_of_faults,
)
from cbcli.settings import Origin, Settings
from cbcli.traces import level, save_in

if TYPE_CHECKING:
    from cbcli.lines.order import UnderWay
    from engine.base import AnswerUnderWay, BaseEngine
    from engine.blueprint import Blueprint
    from engine.prompt import Prompt
    from engine.results import AskResult
    from engine.template import PromptTemplate

TEMPLATES = 32  # that are kept, one for each system prompt


@dataclass(frozen=True)
class Asks:
    """What is wanted of every line besides its answer. compare: a full prefill too; trace_dir: a
    trace in this folder."""

    compare: bool = False
    trace_dir: Path | None = None


@dataclass(frozen=True)
class Answer:
    """What becomes of a line. record: its line of output; kept: that line as an earlier run wrote
    it, and `record` is empty; notes: what the user should be told."""

    number: int
    record: dict[str, Any]
    kept: str = ""
    notes: tuple[str, ...] = ()

    @property
    def failure(self) -> str:
        """What was wrong with the line; "" where it was answered."""
        return str(self.record["error"]["message"]) if "error" in self.record else ""

    @classmethod
    def failed(cls, name: LineName, failure: Failure) -> Answer:
        """For a line that could not be answered."""
        return cls(name.number, {**_named(name), "error": failure.to_json()})

    @classmethod
    def bad(cls, line: BadLine) -> Answer:
        """For a line that is no prompt."""
        return cls.failed(line.name, describe(line.error))

    @classmethod
    def good(cls, line: PromptLine, result: AskResult, cited: Citations | None) -> Answer:
        """For a line that was answered. cited: where its settings ask for that."""
        record = {**_named(line.name), **result.to_json()}
        record |= cited.to_json() if cited is not None else {}
        return cls(line.name.number, record, notes=(*line.notes, *result.notes))


def _named(name: LineName) -> dict[str, Any]:
    return {"id": name.id, "line": name.number, "input": name.digest}


@dataclass(frozen=True)
class _Session:
    """What is opened once for all lines, but for the engine."""

    chooser: Chooser
    blueprint: Blueprint
    store: ChunkStore
    calibrated: Calibrated
    changes: ChangeWatch


@dataclass(frozen=True)
class _LaidOut:
    """A line's prompt, and settings with what was calibrated for it."""

    line: PromptLine
    prompt: Prompt
    chunks: list[ChunkInfo]
    settings: Settings
    retrieve_s: float
    tokenize_s: float


@dataclass(frozen=True)
class _LineUnderWay:
    under_way: AnswerUnderWay
    answer: Callable[[], Answer]

    @property
    def done(self) -> bool:
        return self.under_way.done


class LineRunner:
    """Answers lines; a context manager. The model is loaded with the first line that may be
    answered, or by `open`.

    asks: what of each line, besides its answer.
    """

    def __init__(self, settings: Settings, out: Output, asks: Asks | None = None) -> None:
        self._settings, self._out, self._asks = settings, out, asks or Asks()
        self._stack = ExitStack()
        self._session: _Session | None = None
        self._engine: BaseEngine | None = None
        self._opened_s = 0.0
        self._template = lru_cache(TEMPLATES)(self._load_template)

    @property
    def together(self) -> int:
        """How many lines `begin` is to be given at the same time; 1: they come in turn."""
        asks, settings = self._asks, self._settings
        alone = asks.compare or asks.trace_dir is not None or settings.audit
        return 1 if alone else lines_together(settings)

    def open(self) -> None:
        """Opens store and model, once; not the weights where the settings' mode is refused, which
        lines with another may still not be. Raises what is wrong with them."""
        session = self._open()
        if self._refusal(session, self._settings) is None:
            self._load(session)

    def __call__(self, line: PromptLine) -> Answer:
        """The line's answer; what is wrong with it is its answer too."""
        session = self._open()  # what is wrong here is wrong with all lines
        settings = self._of(line)
        refusal = self._refusal(session, settings)
        if refusal is not None:
            return Answer.failed(line.name, describe(refusal))
        engine = self._load(session)
        try:
            laid_out = self._lay_out(session, engine, settings, line)
            result = engine.generate(
                laid_out.prompt,
                blend=blend_options(laid_out.settings),
                sampling=sampling_options(settings),
                compare=self._asks.compare,
                audit=audit_of(settings, session.store, line.name.number - 1),
                save=settings.save,
                trace=level(settings) if self._asks.trace_dir is not None else None,
                trace_layers=settings.trace_layers,
                question=line.question,
            )
            return self._finish(session, settings, laid_out, result)
        except Exception as error:  # whatever one line ran into, the others are answered
            return Answer.failed(line.name, describe(error))

    # As `order.Several`, of an engine that can.

    def begin(self, line: PromptLine) -> UnderWay | Answer:
        """Takes in a line, to be answered together with others; without what compares, audits or
        records it."""
        session = self._open()
        settings = self._of(line)
        refusal = self._refusal(session, settings)
        if refusal is not None:
            return Answer.failed(line.name, describe(refusal))
        engine = self._load(session)
        try:
            laid_out = self._lay_out(session, engine, settings, line)
            began = time.perf_counter()
            under_way = engine.begin(
                laid_out.prompt, blend_options(laid_out.settings), sampling_options(settings)
            )
        except Exception as error:
            return Answer.failed(line.name, describe(error))

        def finish() -> Answer:
            try:
                result = under_way.finish(began, save=settings.save)
                return self._finish(session, settings, laid_out, result)
            except Exception as error:
                return Answer.failed(line.name, describe(error))

        return _LineUnderWay(under_way, finish)

    def go_on(self) -> None:
        self._load(self._open()).go_on()

    def _recorded(self, result: AskResult, line: PromptLine) -> AskResult:
        """With its trace in a file, or a word why not."""
        folder, notes = self._asks.trace_dir, list(result.notes)
        if result.trace is not None and folder is not None:
            save_in(result.trace, folder / f"{line.name.number:06d}.cbtrace", notes.append)
        return replace(result, notes=tuple(notes))

    def _open(self) -> _Session:
        if self._session is None:
            began = time.perf_counter()
            blend_options(without_auto(self._settings))  # before anything takes long
            blueprint = open_blueprint(self._settings, self._out)
            remember(self._settings, blueprint)  # hashes weights that are new
            opened = open_store(self._settings, many=True, on_damage="go_on")
            store = self._stack.enter_context(opened)
            warn_of_faults(store, self._out)
            if not store.read_only:
                store.catalog.name_model(blueprint.spec.model, blueprint.name)
            calibrated = Calibrated.open(blueprint, self._out, store)
            self._session = _Session(
                Chooser(store), blueprint, store, calibrated, ChangeWatch(store)
            )
            self._opened_s = time.perf_counter() - began  # the engine tells its own time
        return self._session

    def _refusal(self, session: _Session, settings: Settings) -> IntegrityError | None:
        """What the model's gate has against these settings, known without its weights."""
        try:
            session.calibrated.require_gate(settings)
        except IntegrityError as error:
            return error
        return None

    def _load(self, session: _Session) -> BaseEngine:
        if self._engine is None:
            self._engine = self._stack.enter_context(
                load_engine(
                    self._settings,
                    session.blueprint,
                    session.store,
                    together=self.together,
                    out=self._out,
                )
            )
        return self._engine

    def _of(self, line: PromptLine) -> Settings:
        """The settings with the line's own in their place."""
        own = {name: Origin("line", name) for name in line.overrides}
        origins = {**self._settings.origins, **own}
        return replace(self._settings, **line.overrides, origins=origins)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _lay_out(
        self, session: _Session, engine: BaseEngine, settings: Settings, line: PromptLine
    ) -> _LaidOut:
        """The line's prompt, and how it is to be blended."""
        check_ratio(settings)
        began = time.perf_counter()
        chunks = _chunks(session.chooser, settings, line)
        chosen = time.perf_counter()
        prompt = self._template(settings.system).lay_out(
            [engine.chunk(chunk.text, chunk.source or None) for chunk in chunks],
            line.question,
            cite=settings.cite,
        )
        laid_out = time.perf_counter()
        cached = sum(len(s.token_ids) for s in prompt.segments if s.kind == "chunk")
        tokens = PromptTokens(len(prompt.token_ids), cached, len(prompt.prefix_ids))
        wanted = session.calibrated.settle(settings, tokens, own=line.overrides)
        return _LaidOut(line, prompt, chunks, wanted, chosen - began, laid_out - chosen)

    def _finish(
        self, session: _Session, settings: Settings, laid_out: _LaidOut, result: AskResult
    ) -> Answer:
        """The answer of a line from its result."""
        chunks = laid_out.chunks
        session.calibrated.saw(settings, result)
        result = replace(result, notes=(*result.notes, *session.changes.lines(chunks)))
        opened_s, self._opened_s = self._opened_s, 0.0  # counted with the first answer
        timing = replace(
            result.timing,
            load_model_s=opened_s + result.timing.load_model_s,
            retrieve_s=laid_out.retrieve_s,
            tokenize_s=laid_out.tokenize_s,
            total_s=opened_s + result.timing.total_s + laid_out.retrieve_s + laid_out.tokenize_s,
        )
        line = laid_out.line
        cited = Citations.of(result.answer, list(enumerate(chunks, 1))) if settings.cite else None
        return Answer.good(line, self._recorded(result.timed(timing), line), cited)

    def _load_template(self, system: str | None) -> PromptTemplate:
        """The model's template around another system prompt."""
        from engine.template import PromptTemplate

        blueprint = self._open().blueprint
        if system is None or system == self._settings.system:
            return blueprint.template
        return PromptTemplate.load(
            blueprint.path,
            blueprint.tokenizer,
            system=system,
            separator=self._settings.separator,
            template_date=self._settings.template_date,
        )


def _chunks(chooser: Chooser, settings: Settings, line: PromptLine) -> list[ChunkInfo]:
    """The line's chunks, given or retrieved, in the order it asks for."""
    if line.chunks is None:
        return chooser.choose(settings, line.question, ())
    given = [
        ChunkInfo(chunk_id(c.text), c.text, 0, c.source, place, 0, len(c.text))
        if c.text
        else chooser.named([c.name])[0]
        for place, c in enumerate(line.chunks)
    ]
    return in_order(given, settings, line.question)


@contextmanager
def runner_on(settings: Settings, asks: Asks, sharing: int, device: str) -> Iterator[LineRunner]:
    """A runner in a worker's process, its model loaded on `device`.

    sharing: workers on this machine's CPU, which divide its cores.
    """
    from engine.threads import set_threads

    set_threads(settings.threads, sharing if device == "cpu" else 1)
    with LineRunner(replace(settings, device=device), Output(quiet=True), asks) as runner:
        try:
            runner.open()
        except (OSError, RuntimeError, MemoryError) as error:  # no memory left for it, above all
            failure = describe(error)
            raise CacheblendError(f"{device}: {failure.message}", failure.hint) from error
        yield runner
