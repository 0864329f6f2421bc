"""Nothing that is read from a disk may run: no pickle, no eval, in any of our packages."""

import re
import sys
from pathlib import Path

import pytest

from cache_store.store import ChunkStore
from tests.cache_store.support import CONTEXT, SPEC, put, read

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(
    r"^\s*(import|from) (c?[pP]ickle|marshal|shelve|dill|joblib|cloudpickle)\b"
    r"|\bpickle\.loads?\(|\btorch\.load\(|\bnumpy\.load\(|\bnp\.load\(|(?<![\w.])(eval|exec)\(",
    re.MULTILINE,
)


@pytest.mark.parametrize("package", ["cache_store", "engine", "cbcli"])
def test_no_code_of_ours_loads_what_could_run(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in files
        for match in FORBIDDEN.finditer(path.read_text("utf-8"))
    ]
    assert found == []


def test_using_a_store_unpickles_nothing(tmp_path: Path) -> None:
    seen: list[str] = []
    watching = True

    def hook(event: str, args: tuple[object, ...]) -> None:
        if watching and event in ("pickle.find_class", "marshal.loads") and args[:1] != (b"",):
            seen.append(f"{event} {args}")

    sys.addaudithook(hook)
    try:
        with ChunkStore.open(tmp_path / "store", limit_bytes=2**24) as store:
            key = put(store, (1, 2))
            store.catalog.replace_document("a", "d", "{}", [])
        (tmp_path / "store" / "kv" / "cache.db").write_bytes(b"x" * 9000)
        with ChunkStore.open(tmp_path / "store", on_damage="mend") as store:
            read(store, key)
            assert store.find(SPEC, (1, 2), CONTEXT) is not None
            store.verify(repair=True)
            store.stats()
    finally:
        watching = False
    assert [event for event in seen if event.startswith("pickle")] == []


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_hold_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    import os

    old = os.umask(mask)
    try:
        root = tmp_path / "store"
        with ChunkStore.open(root, limit_bytes=2**24) as store:
            put(store, (1, 2))
        (root / "kv" / "cache.db").write_bytes(b"x" * 9000)
        with ChunkStore.open(root, on_damage="mend") as store:
            put(store, (3,))
            for path in (root, *root.rglob("*")):
                wanted = 0o700 if path.is_dir() else 0o600
                assert path.stat().st_mode & 0o777 == wanted, path
        (root / "kv").chmod(0o777)
        (root / "kv" / "partial").chmod(0o777)
        with ChunkStore.open(root):
            pass
        assert (root / "kv").stat().st_mode & 0o777 == 0o700
        assert (root / "kv" / "partial").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(old)
