"""KV to what is stored and back: how far off, how large, and always the same."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.entry import EntryHeader, EntryReader, predicted_file_bytes, write_entry
from cache_store.errors import CacheblendError, DamagedEntry, UsageError
from cache_store.keys import CODE_BITS, GROUP, DType, KVSpec, group_key
from engine import codec as codecs
from engine.codec import KV_DTYPES, Codec, choose_kv_dtype, precision
from engine.kernels.built import library
from engine.model import DTYPES
from tests.cache_store.support import flip

QUANTISED = list(CODE_BITS)
COMPUTED = list(DTYPES.values())
# A share of the spread of the numbers that share a step: half a step, and what rounding steps and
# bases to bf16 adds.
BOUND = {"int8": 0.5 / 255 * 1.1, "int4": 0.5 / 15 * 1.1, "fp8": 2**-5 * 1.1}


def spec_of(dtype: str, heads: int = 3, dim: int = 64, layers: int = 1) -> KVSpec:
    return KVSpec("m" * 64, "t" * 64, layers, heads, dim, dtype)  # type: ignore[arg-type]


def kv(tokens: int, heads: int, dim: int, kind: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """K whose channels differ in size and offset, as models have them, and V."""
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(tokens, heads, dim, generator=g) * torch.randn(heads, dim, generator=g).exp()
    k += 20 * torch.randn(heads, dim, generator=g)
    return [k.to(kind), torch.randn(tokens, heads, dim, generator=g).to(kind)]


def round_trip(codec: Codec, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    out = torch.empty(k.numel() + 3, dtype=k.dtype)
    parts = codec.encode(k, v)
    return [codec.decode(parts[n], bool(n), len(k), out).clone() for n in range(2)]


def spread(x: torch.Tensor, is_v: bool, group: int) -> torch.Tensor:
    """Of each number's group: largest less least."""
    y, dim = x.float(), 2 if is_v else 0
    parts = [p.amax(dim, True).sub(p.amin(dim, True)).expand_as(p) for p in y.split(group, dim)]
    return torch.cat(parts, dim)


def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "library", lambda: None)


@given(
    dtype=st.sampled_from(QUANTISED),
    kind=st.sampled_from(COMPUTED),
    tokens=st.sampled_from([1, 2, 31, 32, 33, 63, 64, 65, 130]),
    heads=st.integers(1, 4),
    dim=st.sampled_from([1, 2, 3, 7, 16, 31, 32, 33, 64, 65, 80, 96]),
    seed=st.integers(0, 9),
)
@settings(max_examples=120, deadline=None)
def test_of_any_shape_it_comes_back_nearly_the_same(
    dtype: str, kind: torch.dtype, tokens: int, heads: int, dim: int, seed: int
) -> None:
    spec, (k, v) = spec_of(dtype, heads, dim), kv(tokens, heads, dim, kind, seed)
    codec = Codec.of(spec, kind)
    parts = codec.encode(k, v)
    assert tuple(part.nbytes for part in parts) == spec.part_bytes(tokens)
    assert [bytes(part) for part in codec.encode(k, v)] == [bytes(part) for part in parts]
    eps = torch.finfo(kind).eps + torch.finfo(torch.bfloat16).eps ** 2
    for is_v, (x, got) in enumerate(zip((k, v), round_trip(codec, k, v), strict=True)):
        assert (got.dtype, got.shape) == (kind, x.shape)
        wide, size = spread(x, bool(is_v), GROUP[dtype]), x.float().abs()
        # A base that bf16 doesn't have makes the spread that much larger.
        more = torch.finfo(torch.bfloat16).eps * size if kind != torch.bfloat16 else 0
        limit = BOUND[dtype] * (wide + more) + eps * (size + wide) + 1e-30
        assert ((got.float() - x.float()).abs() <= limit).all()


@pytest.mark.skipif(library() is None, reason="no kernels were built")
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (70, 3, 64), (5, 2, 33), (129, 1, 80), (64, 2, 128)])
def test_kernels_give_the_bits_of_torch(
    dtype: str, kind: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = kv(*shape, kind)
    codec = Codec.of(spec_of(dtype, *shape[1:]), kind)
    native = round_trip(codec, k, v)
    no_kernels(monkeypatch)
    for ours, theirs in zip(native, round_trip(codec, k, v), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(library() is None, reason="no kernels were built")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_every_code_is_the_same_with_kernels(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [code for code in range(256) if code & 127 != 127]  # not those that are no number
    codec = Codec("fp8", kind, 1, len(codes))
    groups = -(-len(codes) // GROUP["fp8"])
    steps = torch.tensor([1.0] * groups + [0.0] * groups, dtype=torch.bfloat16).view(torch.uint8)
    part = memoryview(steps.numpy().tobytes() + bytes(codes))
    native = codec.decode(part, True, 1, torch.empty(len(codes), dtype=kind))
    no_kernels(monkeypatch)
    assert torch.equal(native, codec.decode(part, True, 1, torch.empty(len(codes), dtype=kind)))


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, -7.5, 300.0, 1e-38, -1e-38, 1e30, -1e30, 2.0**-133]
)
def test_where_all_are_the_same_it_is_kept(dtype: str, value: float) -> None:
    x = torch.full((40, 2, 64), value, dtype=torch.bfloat16)
    for got in round_trip(Codec.of(spec_of(dtype, 2), x.dtype), x, x):
        assert torch.equal(got, x)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_large_channel_costs_the_others_nothing(dtype: str) -> None:
    """K: other channels are as they would be without it."""
    k, v = kv(100, 2, 64, torch.bfloat16)
    codec = Codec.of(spec_of(dtype, 2), torch.bfloat16)
    before = round_trip(codec, k, v)[0]
    k[:, 1, 5] *= 1000
    after = round_trip(codec, k, v)[0]
    rest = torch.ones(2, 64, dtype=torch.bool)
    rest[1, 5] = False
    assert torch.equal(before[:, rest], after[:, rest])


@pytest.mark.parametrize("dtype", [*QUANTISED, "bf16", "fp16"])
@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("is_v", [False, True])
def test_what_is_no_number_is_refused(dtype: str, wrong: float, is_v: bool) -> None:
    parts = kv(70, 3, 64, torch.float32)
    parts[is_v][66, 1, 40] = wrong
    with pytest.raises(CacheblendError, match=f"cannot be stored as {dtype}") as error:
        Codec.of(spec_of(dtype), torch.float32).encode(*parts)
    assert "--kv-dtype auto" in error.value.hint


def test_what_fp16_cannot_hold_is_refused() -> None:
    k, v = kv(4, 1, 8, torch.bfloat16)
    k[2, 0, 3] = 70_000
    with pytest.raises(CacheblendError, match="cannot be stored as fp16"):
        Codec.of(spec_of("fp16", 1, 8), torch.bfloat16).encode(k, v)


@pytest.mark.parametrize("stored", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", COMPUTED)
def test_plain_types_are_converted_and_no_more(stored: DType, kind: torch.dtype) -> None:
    k, v = kv(33, 2, 5, kind)
    codec = Codec.of(spec_of(stored, 2, 5), kind)
    assert codec.plain == (DTYPES[stored] == kind)
    for x, got in zip((k, v), round_trip(codec, k, v), strict=True):
        assert torch.equal(got, x.to(DTYPES[stored]).to(kind))


@pytest.mark.parametrize(
    ("dtype", "share"), [("int8", 0.56), ("fp8", 0.56), ("int4", 0.33), ("bf16", 1.0)]
)
@pytest.mark.parametrize("tokens", [64, 100, 512])
def test_files_are_as_small_as_promised(dtype: str, share: float, tokens: int) -> None:
    """The default model's shape; headers with 30 tokens of context included."""
    sizes = [
        predicted_file_bytes(spec_of(kind, 3, 64, layers=30), tokens, 30, "", "c" * 64)
        for kind in (dtype, "bf16")
    ]
    assert sizes[0] <= share * sizes[1]


def test_types_that_were_there_keep_their_sizes() -> None:
    for dtype, item in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        spec = spec_of(dtype, 3, 5, layers=2)
        assert spec.part_bytes(7) == (7 * 15 * item,) * 2
        assert spec.token_bytes == 2 * 2 * 15 * item


def test_no_two_types_share_a_key() -> None:
    assert len({group_key(spec_of(dtype), (1, 2, 3)) for dtype in KV_DTYPES}) == len(KV_DTYPES)


def stored(path: Path, dtype: str, tokens: int = 70) -> tuple[Codec, list[torch.Tensor]]:
    spec, values = spec_of(dtype, 2, 33), kv(tokens, 2, 33, torch.bfloat16)
    codec = Codec.of(spec, torch.bfloat16)
    with path.open("wb") as file:
        header = EntryHeader(spec, tuple(range(tokens)), (), "", "c")
        write_entry(file.fileno(), header, [codec.encode(*values)])
    return codec, values


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_file_holds_what_was_encoded(dtype: str, tmp_path: Path) -> None:
    codec, values = stored(tmp_path / "entry.kv", dtype)
    with EntryReader(tmp_path / "entry.kv") as reader:
        assert reader.header.spec.dtype == dtype
        parts = reader.layer(0)
        assert [bytes(part) for part in parts] == [bytes(p) for p in codec.encode(*values)]
        for is_v, part in enumerate(parts):
            out = torch.empty(values[0].numel(), dtype=torch.bfloat16)
            got = codec.decode(part, bool(is_v), len(values[0]), out)
            assert torch.equal(got, round_trip(codec, *values)[is_v])


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("where", ["step", "base", "code", "padding", "step of V"])
def test_damage_anywhere_in_a_layer_is_found(dtype: str, where: str, tmp_path: Path) -> None:
    path = tmp_path / "entry.kv"
    codec, values = stored(path, dtype)
    with EntryReader(path) as reader:
        start = reader.header.header_bytes
    k_bytes = codec.encode(*values)[0].nbytes
    steps = 2 * 66 * -(-70 // GROUP[dtype])
    at = {"step": 0, "base": steps, "code": 2 * steps, "padding": k_bytes - 1, "step of V": k_bytes}
    flip(path, start + at[where])
    with EntryReader(path) as reader, pytest.raises(DamagedEntry, match="layer 0"):
        reader.layer(0)


def test_what_is_asked_for_is_chosen() -> None:
    assert choose_kv_dtype("auto", "bf16") == "bf16"
    assert choose_kv_dtype("int8", "fp32") == "int8"
    with pytest.raises(UsageError, match="int5"):
        choose_kv_dtype("int5", "bf16")
    assert (precision("bf16", "bf16"), precision("bf16", "int8")) == ("bf16", "bf16+int8")
