import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.keys import KVSpec, chunk_id, entry_key, group_key, pack_ids, unpack_ids
from tests.cache_store.support import SPEC

IDS = (5, 6, 7)


def test_sizes_follow_from_the_shape() -> None:
    spec = KVSpec("m", "t", layers=30, kv_heads=3, head_dim=64, dtype="bf16")
    assert spec.token_bytes == 23040
    assert spec.layer_bytes(10) == 2 * 10 * 3 * 64 * 2
    assert replace(spec, dtype="fp32").token_bytes == 2 * 23040


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"kv_heads": -1}, {"head_dim": 0}, {"dtype": "int3"}]
)
def test_impossible_specs_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(SPEC, **wrong)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"tokenizer": "another"},
        {"layers": 4},
        {"kv_heads": 4, "head_dim": 2},
        {"dtype": "bf16"},
        {"dtype": "fp16"},
    ],
)
def test_keys_differ_in_everything_the_kv_depends_on(other: dict[str, object]) -> None:
    assert group_key(replace(SPEC, **other), IDS) != group_key(SPEC, IDS)


def test_fields_cannot_run_into_each_other() -> None:
    one, other = replace(SPEC, model="ab", tokenizer="c"), replace(SPEC, model="a", tokenizer="bc")
    assert group_key(one, IDS) != group_key(other, IDS)
    group = group_key(SPEC, IDS)
    assert entry_key(group, (1, 2), "") != entry_key(group, (1,), "")
    assert entry_key(group, (), "long") != entry_key(group, (), "")


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from cache_store.keys import *;"
        f"s = KVSpec(*{(SPEC.model, SPEC.tokenizer, 3, 2, 4, 'fp32')!r});"
        "print(chunk_id('hé'), entry_key(group_key(s, (5, 6, 7)), (1,), 'r'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = f"{chunk_id('hé')} {entry_key(group_key(SPEC, IDS), (1,), 'r')}\n"
    assert outputs == {here}


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_survive_packing(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == tuple(ids)


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "1"])
def test_what_is_no_token_id_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        pack_ids([wrong])  # type: ignore[list-item]


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_has_an_id(text: str) -> None:
    assert len(chunk_id(text)) == 64
    assert chunk_id(text + "x") != chunk_id(text)
