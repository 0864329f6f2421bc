"""Checks a whole store, and puts right what can be."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cache_store.catalog import CATALOG_NAME, SET_ASIDE, Catalog
from cache_store.database import SUFFIXES
from cache_store.disk import PARTIAL, is_abandoned
from cache_store.entry import EntryHeader, EntryReader, read_header
from cache_store.errors import DamagedEntry, IntegrityError, UnreadableEntry
from cache_store.group import Group
from cache_store.index import EntryRow, Index
from cache_store.journal import JOURNAL_FOLDER, journal_files
from cache_store.lease import LEASES
from cache_store.place import KV_FOLDER
from cache_store.results import Problem, VerifyReport
from cache_store.space import CLAIM, Space, walk

ALTERED = "the chunk's text was altered; ingest its document again"
"""What is wrong with a chunk that only its document can mend."""

_RECENT_SECONDS = 3600.0
_CHANGE_SECONDS = 0.2  # a change is through by then, an evicted entry's file gone like its row


@dataclass
class _Findings:
    checked: int = 0
    sound: dict[str, EntryHeader] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    repaired: int = 0

    def add(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))


def verify_store(
    root: Path,
    index: Index,
    space: Space,
    catalog: Catalog,
    *,
    repair: bool,
    on_bytes: Callable[[int], None],
) -> VerifyReport:
    """Checks databases, entries, groups and files of the store at `root`, in that order.

    Writers may be at work: what they are writing, and entries that go away meanwhile, are no
    problems. repair: removes what is damaged or belongs to nothing; damaged databases
    (`cache_store.rebuild` mends them) and files outside the store's own folder are only reported.
    """
    findings = _Findings()
    if repair:
        with index.transaction():
            space.sweep_rebuilding()
    for where, what in ((index.path, index.check()), (catalog.path, catalog.check())):
        if what:
            findings.add(str(where.relative_to(root)), what)
    if findings.problems:  # nothing else can be asked of a damaged database
        return verify_files(root, findings.problems, on_bytes)
    for altered in catalog.altered_chunks():
        findings.add(altered, ALTERED)
    _check_entries(index, space, findings, repair, on_bytes)
    _check_groups(index, findings, repair)
    _check_count(index, findings, repair)
    _check_files(root, index, findings, repair)
    if repair:
        with index.transaction():
            space.sweep_traces()
    return VerifyReport(
        findings.checked, len(findings.sound), tuple(findings.problems), findings.repaired
    )


def verify_files(
    root: Path, faults: Sequence[Problem], on_bytes: Callable[[int], None]
) -> VerifyReport:
    """Checks the chunk files alone, as no database can be asked. faults: why not."""
    problems, checked, done = list(faults), 0, 0
    kv = root / KV_FOLDER
    for path in sorted(kv.glob("*.kv")):
        try:
            with EntryReader(path) as reader:
                reader.verify()
                done += len(reader.file)
                if reader.header.key != path.name.partition(".")[0]:
                    raise DamagedEntry(f"chunk file {path.name} holds another chunk")
        except (DamagedEntry, UnreadableEntry) as error:
            if not os.path.lexists(path):  # evicted while we looked
                continue
            problems.append(Problem(str(path.relative_to(root)), error.message))
        checked += 1
        on_bytes(done)
    return VerifyReport(checked, checked - len(problems) + len(faults), tuple(problems))


def _check_entries(
    index: Index,
    space: Space,
    findings: _Findings,
    repair: bool,
    on_bytes: Callable[[int], None],
) -> None:
    strange = done = 0
    for row in index.entries():
        findings.checked += 1
        if isinstance(row, IntegrityError):
            findings.add("index", row.message)
            strange += 1
            continue
        try:
            with EntryReader(row.path) as reader:
                reader.verify()
                header = reader.header
            if header.key != row.key or header.group != row.group:
                raise DamagedEntry(f"chunk file {row.path.name} holds another chunk")
        except (DamagedEntry, UnreadableEntry) as error:
            if not _is_now(index, row):  # evicted or replaced while we looked
                findings.checked -= 1
                continue
            findings.add(row.key, error.message)
            if repair and isinstance(error, DamagedEntry):
                with contextlib.ExitStack() as stack, index.transaction():
                    if _is_now(index, row):
                        stack.enter_context(space.parting(row.size))
                        space.remove(row)
                findings.repaired += 1
        else:
            findings.sound[row.key] = header
        on_bytes(done := done + row.size)
    if repair and strange:
        findings.repaired += index.delete_strange_rows()


def _is_now(index: Index, row: EntryRow) -> bool:
    """Whether the entry still has the file that its row names."""
    with contextlib.suppress(IntegrityError):
        now = index.entry(row.key)
        return now is not None and now.path == row.path
    return False


def _check_groups(index: Index, findings: _Findings, repair: bool) -> None:
    """The lists of entries against the entries' rows and headers."""
    members: dict[str, set[str]] = {}
    for row in index.entries():
        if isinstance(row, EntryRow):
            members.setdefault(row.group, set()).add(row.key)
    listed = dict(index.groups())
    for key in sorted(members.keys() | listed.keys()):
        group = listed.get(key)
        if isinstance(group, Group) and _agrees(group, members.get(key, set()), findings.sound):
            continue
        if not repair:
            if _group_problem(index, key)[0]:
                time.sleep(_CHANGE_SECONDS)
                if wrong := _group_problem(index, key)[0]:  # it didn't only change meanwhile
                    findings.add(key, wrong)
            continue
        with index.transaction():
            wrong, wanted = _group_problem(index, key)
            if wrong and wanted is None:
                index.delete(key)
            elif wrong and wanted is not None:
                index.set_group(key, wanted)
        if wrong:
            findings.add(key, wrong)
            findings.repaired += 1


def _agrees(group: Group, keys: set[str], headers: dict[str, EntryHeader]) -> bool:
    if {member.key for member in group.members} != keys:
        return False
    return all(_same(group, header) for key in keys if (header := headers.get(key)))


def _same(group: Group, header: EntryHeader) -> bool:
    said = next((member for member in group.members if member.key == header.key), None)
    return (
        said is not None
        and (said.context, said.regime) == (header.context, header.regime)
        and (group.spec, group.tokens) == (header.spec, len(header.token_ids))
    )


def _group_problem(index: Index, key: str) -> tuple[str, Group | None]:
    """What is wrong with a group's list now, and what it should be; from the files' headers."""
    try:
        listed = index.group(key)
    except IntegrityError as error:
        wrong, listed = error.message, None
    else:
        wrong = ""
    wanted: Group | None = None
    rows = index.entries_of(key)
    headers: dict[str, EntryHeader] = {}
    for row in rows:
        with contextlib.suppress(DamagedEntry, UnreadableEntry):  # told of already
            header = headers[row.key] = read_header(row.path)
            group = Group.of(header)
            wanted = wanted.with_members_of(group) if wanted else group
    if wrong:
        return wrong, wanted
    if listed is None:
        return (f"entries of chunk {key[:12]} are in no list" if wanted else ""), wanted
    if _agrees(listed, {row.key for row in rows}, headers):
        return "", listed
    return f"the list of entries of chunk {key[:12]} disagrees with the entries", wanted


def _check_count(index: Index, findings: _Findings, repair: bool) -> None:
    """The bytes that the limit is kept by."""
    if index.miscounted():
        findings.add("index", "the bytes of all entries are counted wrong")
        if repair:
            index.count_anew()
            findings.repaired += 1


def _check_files(root: Path, index: Index, findings: _Findings, repair: bool) -> None:
    """What lies in the folder against what belongs there."""
    strangers = [
        path
        for path in _strangers(root, index)
        # A recent one may be somebody's who is about to name it; a chunk file is named at once.
        if repair
        or not _is_recent(path)
        or path.name == SET_ASIDE
        or (path.suffix == ".kv" and path.parent.name != PARTIAL)
    ]
    if strangers:
        time.sleep(_CHANGE_SECONDS)
    for path in strangers:
        partial = path.parent.name == PARTIAL
        # A writer names its file in the index in the transaction that puts it in place.
        with index.transaction() if repair else contextlib.nullcontext():
            if not os.path.lexists(path) or not _is_stray(path, index, partial):
                continue
            aside = path == root / SET_ASIDE
            ours = aside or path.is_relative_to(index.path.parent)
            if repair and ours and not _is_folder(path):
                path.unlink(missing_ok=True)
                findings.repaired += 1
        what = "half-written file" if partial else "file that belongs to no entry"
        what = "damaged catalog that was set aside" if aside else what
        findings.add(str(path.relative_to(root)), what)


def _strangers(root: Path, index: Index) -> list[Path]:
    kv = index.path.parent
    databases = (index.path, root / CATALOG_NAME)
    own = {root, kv, kv / PARTIAL}
    own |= {path.with_name(path.name + suffix) for path in databases for suffix in SUFFIXES}
    own |= {kv / name for name in index.names()}
    own |= {root / JOURNAL_FOLDER, *journal_files(root), kv / LEASES}
    traces = {(kv / LEASES, ".lease"), (kv / PARTIAL, CLAIM)}  # of the living, or swept in time
    return sorted(
        path
        for path, _ in walk(root)
        if path not in own and (path.parent, path.suffix) not in traces
    )


def _is_stray(path: Path, index: Index, partial: bool) -> bool:
    return is_abandoned(path) if partial else path.name not in index.names()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_recent(path: Path) -> bool:
    try:
        return abs(time.time() - path.lstat().st_mtime) < _RECENT_SECONDS  # a clock may go back
    except FileNotFoundError:
        return True
