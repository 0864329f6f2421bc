"""What `ingest` and `ask` open first: the model, the store, the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cache_store.store import ChunkStore
from cbcli.output import Output
from cbcli.settings import Settings, data_root
from engine import library

if TYPE_CHECKING:
    from engine.blueprint import Blueprint


def open_store(settings: Settings) -> ChunkStore:
    """The store the settings name, made where there is none."""
    return ChunkStore.open(settings.store, limit_bytes=settings.limit)


def model_folder(settings: Settings, out: Output) -> Path:
    """The model's folder; the default model is got where it is missing."""
    if settings.model != library.DEFAULT:
        return library.resolve(settings.model, settings.models_dir)
    from cbcli.commands.models import showing

    with showing(out, f"model {library.DEFAULT}") as progress:
        return library.ensure_default(
            settings.models_dir, offline=settings.offline, say=out.note, progress=progress
        )


def open_blueprint(settings: Settings, out: Output) -> Blueprint:
    """The model without its weights."""
    folder = model_folder(settings, out)
    from engine.blueprint import Blueprint

    return Blueprint.open(
        folder,
        device=settings.device,
        dtype=settings.dtype,
        system=settings.system,
        separator=settings.separator,
        template_date=settings.template_date,
        memo=data_root() / "fingerprints.json",
    )


def shown_source(source: str) -> str:
    """A document's path as a person here would write it: relative where it lies beneath."""
    path, here = Path(source), Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else source
