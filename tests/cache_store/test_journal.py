"""The log in a store's folder: whole lines from many processes, damage, rotation, room."""

import json
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from cache_store import journal as journal_module
from cache_store.errors import CacheblendError, IntegrityError, StoreFullError, UsageError
from cache_store.journal import MAX_BYTES, Journal
from cache_store.place import MIN_LIMIT
from cache_store.store import ChunkStore
from tests.cache_store.support import put

FOLDER = "audit"


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, read_only=False)


def numbers(journal: Journal) -> list[int]:
    return [int(record["n"]) for record in journal.read().records]


def log(tmp_path: Path) -> Path:
    return tmp_path / FOLDER / "log.jsonl"


def test_nothing_was_written_yet(journal: Journal, tmp_path: Path) -> None:
    assert journal.read().records == ()
    assert not (tmp_path / FOLDER).exists()


def test_records_come_back_in_order_and_only_the_owner_reads_them(
    journal: Journal, tmp_path: Path
) -> None:
    old = os.umask(0)
    try:
        for n in range(5):
            journal.append({"n": n, "text": "\u2028 \n é \ud800"})
    finally:
        os.umask(old)
    assert numbers(journal) == [0, 1, 2, 3, 4]
    assert journal.read().records[0]["text"] == "\u2028 \n é \ud800"
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / FOLDER).iterdir()}
    assert modes == {"log.jsonl": 0o600, "count": 0o600}


def test_what_is_no_json_is_not_written(journal: Journal) -> None:
    with pytest.raises(ValueError, match="JSON"):
        journal.append({"n": float("nan")})
    assert journal.read().records == ()


def write_many(folder: Path, process: int, count: int) -> None:
    journal = Journal(folder, read_only=False)
    for n in range(count):
        journal.append({"process": process, "n": n, "number": journal.next_number()})


def test_processes_append_whole_lines_and_count_each_number_once(
    journal: Journal, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write_many, args=(tmp_path, p, 60)) for p in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    lines = journal.read()
    assert lines.damaged == 0
    assert sorted(record["number"] for record in lines.records) == list(range(240))
    for process in range(4):
        assert [r["n"] for r in lines.records if r["process"] == process] == list(range(60))
    assert journal.next_number() == 240


def test_the_last_lines_are_kept(journal: Journal, tmp_path: Path) -> None:
    filler = "x" * 4000
    for n in range(400):  # 1.6 MB
        journal.append({"n": n, "filler": filler})
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        *("count", "log.earlier.jsonl", "log.jsonl"),
    ]
    sizes = [path.stat().st_size for path in (tmp_path / FOLDER).glob("*.jsonl")]
    assert max(sizes) <= MAX_BYTES
    kept = numbers(journal)
    assert kept == list(range(kept[0], 400))
    assert MAX_BYTES < sum(sizes) <= 2 * MAX_BYTES


def test_processes_lose_nothing_while_logs_are_put_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two journals, as two processes have them, over many rotations: the last lines are there."""
    monkeypatch.setattr(journal_module, "MAX_BYTES", 500)
    both = [Journal(tmp_path, read_only=False) for _ in range(2)]
    for n in range(200):
        both[n % 2].append({"n": n})
        assert numbers(both[0])[-10:] == list(range(max(0, n - 9), n + 1))


@pytest.mark.parametrize(
    "damage",
    [
        b'{"n": 7',
        b"\x00\xff\xfe\n",
        b"[1]\n",
        b'"text"\n',
        b"{" * 50_000 + b"\n",
        b"nonsense\n\n\n",
    ],
)
def test_damaged_lines_are_counted_and_spoil_no_others(
    journal: Journal, tmp_path: Path, damage: bytes
) -> None:
    journal.append({"n": 0})
    with log(tmp_path).open("ab") as file:
        file.write(damage)
    assert numbers(journal) == [0]
    journal.append({"n": 1})  # behind a line that was cut short
    assert numbers(journal) == [0, 1]
    assert journal.read().damaged == 1


def test_a_log_somebody_made_huge_is_read_from_its_end(journal: Journal, tmp_path: Path) -> None:
    journal.append({"n": 0})
    with log(tmp_path).open("ab") as file:
        file.write(b"x" * 3 * MAX_BYTES + b"\n" + json.dumps({"n": 1}).encode() + b"\n")
    assert numbers(journal) == [1]
    assert journal.read().damaged == 1


@pytest.mark.parametrize("count", [b"", b"nonsense", b"\xff\xff", b"-3", b"9" * 90])
def test_a_damaged_counter_begins_anew(journal: Journal, tmp_path: Path, count: bytes) -> None:
    assert [journal.next_number() for _ in range(3)] == [0, 1, 2]
    (tmp_path / FOLDER / "count").write_bytes(count)
    first = journal.next_number()
    assert journal.next_number() == first + 1


def test_a_write_that_fails_leaves_no_half_line(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append({"n": 0})
    before = log(tmp_path).read_bytes()
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(file)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(file, bytes(data)[:5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CacheblendError, match="no space left"):
        journal.append({"n": 1})
    monkeypatch.undo()
    assert log(tmp_path).read_bytes() == before


def test_a_read_only_store_is_read_and_not_written(journal: Journal, tmp_path: Path) -> None:
    journal.append({"n": 0})
    reader = Journal(tmp_path, read_only=True)
    assert numbers(reader) == [0]
    for write in (lambda: reader.append({"n": 1}), reader.next_number, reader.require_writable):
        with pytest.raises(UsageError, match="reading only"):
            write()
    assert numbers(journal) == [0]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / FOLDER).symlink_to(outside)
    with pytest.raises(IntegrityError, match="is a link"):
        Journal(tmp_path / "one", read_only=False).append({"n": 0})
    journal = Journal(tmp_path / "two", read_only=False)
    (tmp_path / "two").mkdir()
    journal.append({"n": 0})
    log(tmp_path / "two").unlink()
    log(tmp_path / "two").symlink_to(outside / "file")
    with pytest.raises(CacheblendError):
        journal.append({"n": 1})
    assert list(outside.iterdir()) == []


def test_what_is_in_the_place_of_the_log_is_one_clear_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path, read_only=False)
    journal.append({"n": 0})
    log(tmp_path).unlink()
    os.mkfifo(log(tmp_path))
    for use in (journal.read, lambda: journal.append({"n": 1})):
        with pytest.raises(CacheblendError, match=r"no file|log\.jsonl"):
            use()


def test_a_locked_log_is_not_waited_for_for_ever(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    journal.append({"n": 0})
    monkeypatch.setattr(journal_module, "_LOCK_SECONDS", 0.0)
    with (tmp_path / FOLDER / "count").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for use in (journal.read, journal.next_number, lambda: journal.append({"n": 1})):
            with pytest.raises(CacheblendError, match="in use by another process"):
                use()
    assert numbers(journal) == [0]


def test_a_store_knows_the_log_as_its_own_and_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with ChunkStore.open(path, limit_bytes=MIN_LIMIT) as store:
        key = put(store, (1, 2, 3))
        before = store.used_bytes()
        for n in range(80):
            store.journal.append({"n": n, "filler": "x" * 4000})
        store.journal.next_number()
        assert store.used_bytes() > before + 80 * 4000
        assert store.used_bytes() <= store.limit
        assert store.contains(*_arguments(store, key))
        for file in (path / FOLDER).iterdir():
            os.utime(file, (0, 0))  # old, so that verify would call it a stranger
        assert store.verify().problems == ()
        assert store.verify(repair=True).problems == ()
        assert numbers(store.journal)[-1] == 79
        (path / FOLDER / "else.txt").write_text("x")
        os.utime(path / FOLDER / "else.txt", (0, 0))
        assert [p.where for p in store.verify().problems] == [f"{FOLDER}/else.txt"]
    with ChunkStore.open(path, read_only=True) as store:
        assert numbers(store.journal)[-1] == 79


def _arguments(store: ChunkStore, key: str):
    with store.open_entry(key) as reader:
        header = reader.header
    return header.spec, header.token_ids, header.context, header.regime


def test_a_full_store_makes_room_for_the_log_or_refuses_it(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", limit_bytes=MIN_LIMIT) as store:
        refused = 0
        for n in range(2000):
            try:
                store.protect(put(store, (n, n + 1, n + 2)))  # nothing of it may be evicted
            except StoreFullError:
                break
        for n in range(200):
            try:
                store.journal.append({"n": n, "filler": "x" * 4000})
            except StoreFullError:
                refused += 1
        assert refused
        assert store.used_bytes() <= store.limit
        assert store.verify().problems == ()


def test_a_folder_with_a_log_alone_may_become_a_store(tmp_path: Path) -> None:
    Journal(tmp_path, read_only=False).append({"n": 0})
    with ChunkStore.open(tmp_path, limit_bytes=MIN_LIMIT) as store:
        assert numbers(store.journal) == [0]
