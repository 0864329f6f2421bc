"""`ingest --watch`: an ingest, and then another of what changes, until it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cache_store.errors import CacheblendError, UsageError
from cbcli.errors import ExitCode, Interrupted, describe
from cbcli.file_choice import file_choice
from cbcli.ingest_report import tell
from cbcli.ingest_run import IngestRun
from cbcli.output import Output
from cbcli.settings import Settings

if TYPE_CHECKING:
    from engine.blueprint import Blueprint
    from engine.documents import Found
    from engine.documents.watching import Watch


def check_watch(paths: Sequence[str], *, files_from: str | None, dry_run: bool) -> None:
    """Raises UsageError for what can't be watched."""
    if dry_run:
        raise UsageError("--watch and --dry-run exclude each other", "give one of them")
    if files_from is not None or "-" in paths:
        raise UsageError(
            "a list of files and standard input can't be watched", "name files and folders"
        )


def watch(
    out: Output,
    settings: Settings,
    blueprint: Blueprint,
    places: tuple[str, ...],
    paths: Sequence[str],
) -> None:
    """Ingests, and keeps the store as the files are; ends by an interrupt only.

    A round that fails is told, and what it was at is tried again in the next. Raises what the
    first ingest raises.
    """
    from engine.documents import find_files
    from engine.documents.watching import Known, Watch

    choice = file_choice(settings)

    def walk() -> Iterator[Found]:
        there = [path for path in paths if Path(path).exists()]
        return find_files(there, choice=choice)

    known = Known()
    with (
        Watch(map(Path, paths), hidden=choice.hidden) as watching,
        IngestRun(out, settings, blueprint, places) as run,
    ):
        done = run.ingest(known.note(find_files(paths, choice=choice)), _gone(run, watching))
        tell(out, blueprint, done, {"round": 0})
        number = 0
        try:
            out.note("watching; Ctrl-C ends it")
            while True:
                watching.wait()
                try:
                    found = walk()
                except CacheblendError:  # gone between two looks: told of again
                    continue
                changes = known.changes(found, watching.lost())
                if not changes.any:
                    continue
                try:
                    done = run.ingest(iter(changes.found), changes.gone)
                except Interrupted:
                    raise
                except (CacheblendError, OSError) as error:
                    known.forget(changes)
                    failure = describe(error)
                    out.warn(failure.message, failure.hint or "the next change tries it again")
                    continue
                number += 1
                tell(out, blueprint, done, {"round": number})
        except KeyboardInterrupt:
            out.note("stopped watching")
            raise typer.Exit(ExitCode.INTERRUPTED) from None


def _gone(run: IngestRun, watching: Watch) -> tuple[str, ...]:
    """Documents in the catalog whose files have gone from the watched folders meanwhile."""
    from engine.changes import missing_files

    missing = missing_files(run.store.catalog.documents())
    folders = [f"{str(folder).rstrip('/')}/" for folder in watching.folders]
    return tuple(source for source in sorted(missing) if source.startswith(tuple(folders)))
