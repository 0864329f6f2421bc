"""Ingests over one store with one model, which is loaded when it is first needed and stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from cache_store.errors import UsageError
from cbcli.errors import Interrupted
from cbcli.file_choice import read_all
from cbcli.output import Output
from cbcli.present import remember
from cbcli.session import load_engine, open_store, say_notes, shown_source, upload
from cbcli.settings import Settings
from cbcli.units import size_text

if TYPE_CHECKING:
    from cbcli.live.ingest import IngestScene
    from cbcli.progress import Progress
    from engine.base import BaseEngine
    from engine.blueprint import Blueprint
    from engine.documents import Found
    from engine.ingest import ChunkComputer, IngestReport
    from engine.ingest_plan import IngestPlan, OnBytes


@dataclass(frozen=True)
class Ingested:
    """What one ingest did. damaged: what was found so in the store, a message each."""

    plan: IngestPlan
    report: IngestReport
    damaged: list[str]
    seconds: float


class IngestRun:
    """A context manager. places: devices that share the work, none for the model's own."""

    def __init__(
        self, out: Output, settings: Settings, blueprint: Blueprint, places: tuple[str, ...]
    ) -> None:
        from engine.model import choose_device

        for place in places:
            choose_device(place)  # whether it is there, before any work
        self._out, self._settings, self._blueprint = out, settings, blueprint
        self._places = places
        self._closing = ExitStack()
        self._engine: BaseEngine | None = None

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            self.store = closing.enter_context(open_store(self._settings, on_damage="mend"))
            for problem in self.store.mended:
                self._out.warn(f"{problem.where}: {problem.what}")
            if self.store.read_only:
                where = self._settings.store
                raise UsageError(f"{where}: the store cannot be written", "see its owner")
            self._tell_limit()
            self._closing = closing.pop_all()
        return self

    def _tell_limit(self) -> None:
        """Warns of a --limit that does nothing, as the store has one."""
        settings = self._settings
        if settings.origin("limit").kind == "flag" and settings.limit != self.store.limit:
            kept = size_text(self.store.limit)
            self._out.warn(
                f"--limit is for a new store: {settings.store} keeps its {kept}",
                "cacheblend store limit SIZE changes it",
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.__exit__(kind, error, trace)
        if error is None:
            say_notes(
                self.store, self._out
            )  # what closing it has to say, such as what isn't uploaded

    def ingest(self, found: Iterator[Found], gone: tuple[str, ...] = ()) -> Ingested:
        """Brings files into the store, and takes the documents of those that are gone out of it.
        Raises Interrupted with how far it came, and what `run_ingest` raises."""
        from engine.chunking import Cutting
        from engine.ingest import IngestReport, remove_documents, run_ingest
        from engine.ingest_plan import Cutter

        out, settings, blueprint, store = self._out, self._settings, self._blueprint, self.store
        began = time.monotonic()
        report = IngestReport()
        with _scene(out, settings) as scene:
            cutting = Cutting(settings.chunk_tokens, settings.overlap, settings.headings)
            cutter = Cutter(store, blueprint, cutting, settings.check)
            with out.progress("checking", unit="bytes") as progress:
                plan = cutter.plan(read_all(out, settings, found), _shown(progress))
            store.catalog.name_model(blueprint.spec.model, blueprint.name)
            remember(settings, blueprint)
            if scene is not None:
                scene.work(plan, report, cutter.predicted_bytes)
            try:
                with out.progress("computing", unit="tokens", total=plan.tokens) as progress:

                    def make_writer() -> ChunkComputer:
                        return self._writer(plan, progress, scene)

                    run_ingest(
                        plan, cutter, make_writer, report, progress.update, settings.collections
                    )
                remove_documents(store, gone, report)
                seconds = time.monotonic() - began
                upload(store, out)
            except KeyboardInterrupt as error:
                raise Interrupted(
                    f"interrupted: {report.computed_chunks} of {len(plan.missing)} chunks "
                    f"computed and stored, {report.documents} of {len(plan.documents)} documents "
                    "complete",
                    "run the same command again to go on from there",
                ) from error
        say_notes(store, out)
        damaged = store.damaged[:]
        store.damaged.clear()
        return Ingested(plan, report, damaged, seconds)

    def _writer(
        self, plan: IngestPlan, progress: Progress, scene: IngestScene | None
    ) -> ChunkComputer:
        """What computes, on several devices or with the model that is loaded."""
        settings, blueprint, places = self._settings, self._blueprint, self._places
        if scene is not None:
            scene.computing()
        if len(places) > 1 and plan.missing:
            from engine.ingest_workers import DeviceWriters

            progress.update(0, label=f"computing on {', '.join(places)}")
            return DeviceWriters(
                places,
                blueprint,
                self.store,
                tokens=plan.tokens,
                protected=plan.held,
                threads=settings.threads,
                say=self._out.warn,
            )
        if self._engine is None:
            progress.update(0, label="loading the model")
            self._engine = self._closing.enter_context(
                load_engine(settings, blueprint, self.store, longest=1, out=self._out)
            )
        writer = self._engine.writer()
        progress.update(0, label="computing")
        if scene is not None:
            scene.computing()
        return writer


@contextmanager
def _scene(out: Output, settings: Settings) -> Iterator[IngestScene | None]:
    """What shows the work while it is done, where that is wanted."""
    if not settings.live:
        yield None
        return
    from cbcli.live.ingest import IngestScene

    scene = IngestScene(shown_source)
    with out.live(scene) as view:
        yield scene
        view.close(keep=False)  # what was done is reported


def _shown(progress: Progress) -> OnBytes:
    """Shows checking, where it takes long, and downloading."""
    began, now = 0.0, ""

    def show(what: str, done: int, total: int | None) -> None:
        nonlocal began, now
        if what != now:
            began, now = time.monotonic(), what
            progress.restart(what)
        if what != "checking" or time.monotonic() - began > 1:
            progress.update(done, total=total)

    return show
