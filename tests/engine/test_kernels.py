"""The kernels in C and those for CUDA against torch, and all against float64."""

import shutil
import subprocess
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from engine.attention import AttentionPlan
from engine.kernels import built, cuda, kernels_for, native
from engine.kernels.built import library, load
from engine.kernels.cuda import CudaKernels
from engine.kernels.native import NativeKernels
from engine.kernels.plain import PlainKernels
from engine.kernels.protocol import Kernels
from tests.engine.cuda_stand_ins import flash_on_cpu, flex_on_cpu

BF16 = torch.bfloat16
CPU = torch.device("cpu")
BUILT = library()

native_only = pytest.mark.skipif(BUILT is None, reason="the kernels in C were not built here")


def without_tiles() -> NativeKernels:
    """As on a CPU that has none."""
    kernels = NativeKernels(BUILT)  # type: ignore[arg-type]
    kernels._tiles = False
    return kernels


KERNELS = [
    pytest.param(PlainKernels, id="torch"),
    pytest.param(lambda: NativeKernels(BUILT), id="native", marks=native_only),  # type: ignore[arg-type]
    pytest.param(without_tiles, id="native-rows", marks=native_only),
    pytest.param(lambda: CudaKernels(None, None), id="cuda-masks"),
    pytest.param(lambda: CudaKernels(flash_on_cpu, flex_on_cpu), id="cuda-fused"),
]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    monkeypatch.setattr(cuda, "_is_much", lambda plan, window: True)  # FlexAttention for all
    made: Kernels = request.param()
    return made


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(BF16)


def off_by(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative distance; rounding to bfloat16 alone makes about 0.0017."""
    assert result.isfinite().all()
    return float((result.double() - exact).norm() / exact.norm().clamp_min(1e-9))


def exact_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: list[int], window: int | None
) -> torch.Tensor:
    """Attention in float64, key by key as the words have it."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    shared = q.shape[1] // k.shape[0]
    for i, p in enumerate(positions):
        first = 0 if window is None else max(0, p - window + 1)
        for head in range(q.shape[1]):
            keys, values = k[head // shared, first : p + 1], v[head // shared, first : p + 1]
            scores = keys.double() @ q[i, head].double() / q.shape[2] ** 0.5
            out[i, head] = scores.softmax(0) @ values.double()
    return out


@pytest.mark.parametrize(
    ("tokens", "length", "heads", "kv_heads", "dim", "window"),
    [
        (1, 1, 9, 3, 64, None),
        (1, 200, 32, 1, 64, None),
        (5, 40, 9, 3, 64, None),
        (24, 100, 4, 4, 128, None),
        (70, 333, 8, 2, 96, None),
        (33, 33, 2, 1, 32, None),
        (40, 161, 6, 2, 256, None),
        (300, 300, 4, 2, 64, None),
        (150, 700, 9, 3, 64, None),
        (24, 5000, 9, 3, 64, None),  # several spans of keys
        (24, 5000, 6, 3, 64, 1500),
        (60, 700, 9, 3, 64, 50),
        (60, 60, 9, 3, 64, 7),
        (90, 300, 4, 1, 64, 1),
        (60, 300, 9, 3, 64, 2**32),
        (60, 3000, 9, 3, 64, 20),  # some queries see nothing of whole blocks
        (20, 50, 4, 2, 48, None),  # a size the tiles don't cover
    ],
)
@pytest.mark.parametrize("run", [False, True], ids=["scattered", "last"])
def test_attention_is_exact_by_position(
    kernels: Kernels,
    tokens: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    run: bool,
) -> None:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(tokens))
    chosen = sorted(order[:tokens].tolist())
    positions = list(range(length - tokens, length)) if run else chosen
    q = randn(tokens, heads, dim, seed=1)
    k, v = randn(kv_heads, length + 40, dim, seed=2), randn(kv_heads, length + 40, dim, seed=3)
    for x in (k, v):  # what no query may see must not matter, whatever it is
        x[:, positions[-1] + 1 :] = torch.nan
        if window is not None:
            x[:, : max(0, positions[0] - window + 1)] = 100.0
    plan = AttentionPlan(positions, CPU, BF16)
    out = kernels.attend(q, k, v, plan, window, torch.empty_like(q))
    assert off_by(out, exact_attention(q, k, v, positions, window)) < 0.003


def test_attention_of_sharp_and_of_equal_scores(kernels: Kernels) -> None:
    length, plan = 400, AttentionPlan(list(range(0, 400, 5)), CPU, BF16)
    v = randn(1, length, 64, seed=5)
    q, k = randn(80, 2, 64, seed=6, scale=8), randn(1, length, 64, seed=7, scale=8)
    sharp = kernels.attend(q, k, v, plan, None, torch.empty_like(q))
    assert off_by(sharp, exact_attention(q, k, v, plan.bounds, None)) < 0.003
    equal = kernels.attend(torch.zeros_like(q), k, v, plan, None, torch.empty_like(q))
    assert off_by(equal, exact_attention(torch.zeros_like(q), k, v, plan.bounds, None)) < 0.003


@native_only
def test_attention_of_few_and_of_many_queries_agree_whatever_the_threads() -> None:
    kernels, before = NativeKernels(BUILT), torch.get_num_threads()  # type: ignore[arg-type]
    q, kv = randn(40, 9, 64, scale=3), randn(2, 3, 2500, 64, seed=1)
    plan, found = AttentionPlan([*range(2460, 2500)], CPU, BF16), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(kernels.attend(q, *kv, plan, None, torch.empty_like(q)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, found[0]) for result in found)
    exact = exact_attention(q, *kv, plan.bounds, None)
    for few in (0, 10**9):
        with patch.object(native, "_SOME", few):
            assert off_by(kernels.attend(q, *kv, plan, None, torch.empty_like(q)), exact) < 0.003


def weights(width: int, inner: int, *, bias: bool) -> SimpleNamespace:
    made = SimpleNamespace(gate_bias=None, up_bias=None)
    made.gate, made.up = (randn(width, inner, seed=n, scale=0.1) for n in (1, 2))
    if bias:
        made.gate_bias, made.up_bias = randn(width, seed=3), randn(width, seed=4)
    return made


SIZES = [
    (0, 64, 32),
    (1, 64, 32),
    (3, 576, 96),
    (31, 96, 64),
    (32, 576, 576),
    (45, 1536, 64),
    (200, 704, 288),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "inner", "width"), [*SIZES, (20, 40, 24), (40, 64, 40)])
def test_products(kernels: Kernels, rows: int, inner: int, width: int, bias: bool) -> None:
    x, w = randn(rows, inner), weights(width, inner, bias=bias)
    out = kernels.linear(x, w.gate, w.gate_bias, torch.empty(rows, width, dtype=BF16))
    exact = x.double() @ w.gate.double().t()
    assert off_by(out, exact + (w.gate_bias.double() if bias else 0)) < 0.003


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("rows", "inner", "width"), [*SIZES, (20, 40, 24)])
def test_gated_products(
    kernels: Kernels, rows: int, inner: int, width: int, activation: str, bias: bool
) -> None:
    x, w = randn(rows, inner, scale=3), weights(width, inner, bias=bias)
    slots = {name: torch.empty(rows, width, dtype=BF16) for name in ("gate", "up")}
    out = kernels.gated(x, w, activation, slots.__getitem__)  # type: ignore[arg-type]
    gate, up = x.double() @ w.gate.double().t(), x.double() @ w.up.double().t()
    if bias:
        gate, up = gate + w.gate_bias.double(), up + w.up_bias.double()
    if activation == "silu":
        exact = F.silu(gate) * up
    else:
        exact = F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up
    assert off_by(out, exact) < 0.006


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(0, 32), (1, 16), (5, 1536), (3, 24)])
def test_gating_pairs(kernels: Kernels, rows: int, width: int, activation: str) -> None:
    x = randn(rows, 2 * width, scale=4)
    out = kernels.gate_pairs(x, activation, torch.empty(rows, width, dtype=BF16))
    gate, up = x.double().chunk(2, -1)
    if activation == "silu":
        exact = F.silu(gate) * up
    else:
        exact = F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up
    assert off_by(out, exact) < 0.006


@native_only
def test_a_products_rows_do_not_depend_on_the_others() -> None:
    kernels = kernels_for(CPU, BF16)
    x, w = randn(333, 1536), randn(576, 1536)
    whole = kernels.linear(x, w, None, torch.empty(333, 576, dtype=BF16))
    for rows in (slice(0, 1), slice(17, 80), slice(100, 333)):
        part = x[rows].contiguous()
        alone = kernels.linear(part, w, None, torch.empty(len(part), 576, dtype=BF16))
        assert torch.equal(alone, whole[rows])


@pytest.mark.parametrize("kind", [BF16, torch.float32])
@pytest.mark.parametrize("size", [8, 64, 576, 600])
def test_norm(kernels: Kernels, size: int, kind: torch.dtype) -> None:
    x, weight, delta = randn(5, size), randn(size, seed=1).to(kind), randn(5, size, seed=2)
    weight = weight if kind == BF16 else weight + 2**-12  # which bfloat16 can't hold

    def exact(y: torch.Tensor) -> torch.Tensor:
        y = y.double()
        return y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()

    out = torch.empty_like(x)
    result = kernels.norm(x, weight, 1e-5, out)
    assert result.dtype == BF16
    assert off_by(result, exact(x)) < 0.003
    summed = (x.double() + delta.double()).to(BF16)
    assert off_by(kernels.add_norm(x, delta, weight, 1e-5, out), exact(summed)) < 0.003
    assert torch.equal(x, summed)
    assert off_by(kernels.norm(x, weight, 1e-5, x), exact(summed)) < 0.003  # in place


@pytest.mark.parametrize("turned", [0, 16, 64])
@pytest.mark.parametrize("where", ["in place", "run of a cache", "scattered in a cache", "fresh"])
def test_placing(kernels: Kernels, turned: int, where: str) -> None:
    x = randn(7, 3, 64)
    angles = torch.linspace(0, 3, 7 * turned // 2).view(7, turned // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], -1)
    a, b = x.double()[..., : turned // 2], x.double()[..., turned // 2 : turned]
    c, s = angles.cos().double()[:, None], angles.sin().double()[:, None]
    exact = torch.cat([a * c - b * s, b * c + a * s, x.double()[..., turned:]], -1)
    cache, places = randn(3, 20, 64, seed=9), None
    before = cache.clone()
    out = {"in place": x, "fresh": torch.empty_like(x)}.get(where)
    rows = list(range(4, 11))
    if where == "run of a cache":
        out = cache[:, 4:11].transpose(0, 1)
    elif where == "scattered in a cache":
        rows = [0, 3, 4, 9, 11, 12, 19]
        out, places = cache.transpose(0, 1), torch.tensor(rows)
    assert out is not None
    kernels.place(x, (cos, sin) if turned else None, out, places)
    if out is not x and where != "fresh":
        out = cache.transpose(0, 1)[rows]
        others = [row for row in range(20) if row not in rows]
        assert torch.equal(cache[:, others], before[:, others])
    assert off_by(out, exact) < 0.003


@pytest.mark.parametrize("turned", [0, 16, 64])
def test_placing_runs(kernels: Kernels, turned: int) -> None:
    angles = torch.linspace(0, 9, 400 * turned // 2).view(400, turned // 2)
    tables = (angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], -1))
    runs = [(n, randn(m, 3, 64, seed=n), randn(m, 3, 64, seed=m)) for n, m in ((2, 5), (70, 130))]
    k_out, v_out = randn(3, 400, 64, seed=7), randn(3, 400, 64, seed=8)
    k_exact, v_exact = k_out.clone(), v_out.clone()
    for start, k, v in runs:
        here = slice(start, start + len(k))
        rows = (tables[0][here], tables[1][here]) if turned else None
        PlainKernels().place(k, rows, k_exact[:, here].transpose(0, 1))
        v_exact[:, here] = v.transpose(0, 1)
    kernels.place_runs(runs, tables if turned else None, k_out, v_out)
    assert off_by(k_out, k_exact.double()) < 0.001
    assert torch.equal(v_out, v_exact)
    kernels.place_runs([], tables, k_out, v_out)
    assert torch.equal(v_out, v_exact)


def exact_shift(
    x: torch.Tensor,
    spans: list[tuple[int, int]],
    shifts: torch.Tensor,
    angles: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """In float64, position by position; angles [positions, half of what turns]."""
    out = x.double().clone()
    half = 0 if angles is None else angles.shape[1]
    for (start, end), shift in zip(spans, shifts.double(), strict=True):
        for p in range(start, end):
            more = shift.clone()
            if angles is not None:
                a, b = shift[:, :half], shift[:, half : 2 * half]
                c, s = angles[p].double().cos() * scale, angles[p].double().sin() * scale
                more[:, :half], more[:, half : 2 * half] = a * c - b * s, b * c + a * s
            out[:, p] += more
    return out


@pytest.mark.parametrize(
    ("heads", "dim", "turned", "spans"),
    [
        (3, 64, 64, [(2, 66), (66, 67), (70, 133)]),
        (3, 64, 0, [(0, 64)]),  # a layer without RoPE
        (2, 96, 24, [(5, 69), (190, 200)]),  # partly turned, up to the end
        (1, 10, 6, [(3, 4)]),
        (5, 7, 4, [(1, 3), (3, 3), (9, 30)]),  # odd sizes, and a span of nothing
        (2, 6, 2, [(0, 200)]),
        (3, 64, 64, []),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1.2079])
def test_shifting(
    kernels: Kernels,
    heads: int,
    dim: int,
    turned: int,
    spans: list[tuple[int, int]],
    scale: float,
) -> None:
    angles = torch.linspace(0, 40, 200 * turned // 2).view(200, turned // 2) if turned else None
    tables = None
    if angles is not None:
        cos, sin = angles.cos() * scale, angles.sin() * scale
        tables = (cos.repeat(1, 2), torch.cat([-sin, sin], -1))
    shifts = randn(len(spans), 2, heads, dim, seed=3).float()
    at = torch.tensor(spans, dtype=torch.int64).view(-1, 2).t().contiguous()
    k, v = randn(heads, 200, dim, seed=1), randn(heads, 200, dim, seed=2)
    exact_k = exact_shift(k, spans, shifts[:, 0], angles, scale)
    exact_v = exact_shift(v, spans, shifts[:, 1], None, scale)
    others = [p for p in range(200) if not any(a <= p < b for a, b in spans)]
    before = k.clone(), v.clone()
    kernels.shift(k, v, at, shifts, tables)
    assert off_by(k, exact_k) < 0.003
    assert off_by(v, exact_v) < 0.003
    for x, was in zip((k, v), before, strict=True):
        assert torch.equal(x[:, others], was[:, others])


def test_shifting_part_of_a_cache(kernels: Kernels) -> None:
    """Which begins anywhere in its memory, and whose heads lie apart."""
    angles = torch.linspace(0, 9, 40 * 8).view(40, 8)
    tables = (angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], -1))
    memory = randn(1 + 2 * 3 * 50 * 16)
    k, v = (x[:, :40] for x in memory[1:].view(2, 3, 50, 16))
    spans, shifts = [(0, 5), (31, 40)], randn(2, 2, 3, 16, seed=3).float()
    exact = [
        exact_shift(k, spans, shifts[:, 0], angles, 1), exact_shift(v, spans, shifts[:, 1], None, 1)
    ]  # fmt: skip
    before = memory.clone()
    kernels.shift(k, v, torch.tensor(spans).t().contiguous(), shifts, tables)
    assert off_by(k, exact[0]) < 0.003
    assert off_by(v, exact[1]) < 0.003
    assert memory[0] == before[0]
    after, was = (x[1:].view(2, 3, 50, 16)[:, :, 40:] for x in (memory, before))
    assert torch.equal(after, was)


def test_shifting_what_lies_otherwise(kernels: Kernels) -> None:
    """Heads within positions, spans by rows, every other shift: torch takes them as they are."""
    wide_k, wide_v = randn(40, 3, 16, seed=1), randn(40, 3, 16, seed=2)
    k, v = wide_k.transpose(0, 1), wide_v.transpose(0, 1)
    spans, shifts = [(2, 9), (20, 33)], randn(4, 2, 3, 16, seed=3).float()[::2]
    exact = exact_shift(k, spans, shifts[:, 0], None, 1)
    kernels.shift(k, v, torch.tensor(spans).t(), shifts, None)
    assert off_by(k, exact) < 0.003


def test_shifts_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    memory, table = randn(2, 3, 40, 16), torch.ones(50, 16)
    before, (k, v) = memory.clone(), memory[..., :30, :]
    shifts = torch.ones(1, 2, 3, 16)
    for spans, more, tables in (
        ([(25, 31)], shifts, None),  # behind the cache
        ([(5, 9)], torch.ones(1, 2, 3, 12), None),
        ([(5, 9)], shifts, (table[:7], table[:7])),  # more positions than angles
    ):
        with pytest.raises((IndexError, RuntimeError)):
            kernels.shift(k, v, torch.tensor(spans).t().contiguous(), more, tables)
    assert torch.equal(memory, before)


@native_only
def test_any_sizes_are_shifted_as_torch_does_it() -> None:
    random, native_ones = Random(0), NativeKernels(BUILT)  # type: ignore[arg-type]
    threads = torch.get_num_threads()
    try:
        for seed in range(60):
            torch.set_num_threads(random.choice([1, 2, 5]))
            heads, dim, length = random.randint(1, 5), random.randint(2, 140), random.randint(1, 90)
            turned = 2 * random.randint(0, dim // 2)
            cuts = sorted(random.choices(range(length + 1), k=2 * random.randint(0, 6)))
            spans = torch.tensor(cuts, dtype=torch.int64).view(-1, 2).t().contiguous()
            tables = (torch.randn(length, turned), torch.randn(length, turned)) if turned else None
            shifts = randn(spans.shape[1], 2, heads, dim, seed=seed).float()
            pairs = [[randn(heads, length, dim, seed=s) for s in (seed, seed + 99)] for _ in "ab"]
            native_ones.shift(*pairs[0], spans, shifts, tables)
            PlainKernels().shift(*pairs[1], spans, shifts, tables)
            for a, b in zip(*pairs, strict=True):
                torch.testing.assert_close(a.float(), b.float(), rtol=0.01, atol=1e-6)
    finally:
        torch.set_num_threads(threads)


def test_places_that_are_not_there_are_refused(kernels: Kernels) -> None:
    x, memory = randn(2, 3, 64), randn(3, 40, 64)
    out, before = memory[:, 10:30].transpose(0, 1), memory.clone()
    for row in (-1, 20):
        with pytest.raises((IndexError, RuntimeError)):
            kernels.place(x, None, out, torch.tensor([0, row]))
    assert torch.equal(memory[:, :10], before[:, :10])
    assert torch.equal(memory[:, 30:], before[:, 30:])


def test_sizes_that_do_not_go_together_are_refused(kernels: Kernels) -> None:
    x, memory, table = randn(7, 3, 64), randn(3, 40, 64), torch.ones(40, 64)
    before = memory.clone()

    def out(rows: int) -> torch.Tensor:
        return memory[:, :rows].transpose(0, 1)

    with pytest.raises(RuntimeError):  # more tokens than there is room for
        kernels.place(x, None, out(5))
    with pytest.raises(RuntimeError):  # more tokens than angles
        kernels.place(x, (table[:5], table[:5]), out(7))
    with pytest.raises(RuntimeError):
        kernels.place_runs([(5, x, x)], (table[:10], table[:10]), memory, memory.clone())
    with pytest.raises(RuntimeError):
        kernels.place_runs([(35, x, x)], (table, table), memory, memory.clone())
    with pytest.raises(RuntimeError):
        kernels.norm(x, randn(32), 1e-5, torch.empty_like(x))
    assert torch.equal(memory[:, 7:], before[:, 7:])


@native_only
def test_attention_reads_nothing_behind_the_cache() -> None:
    kernels = kernels_for(CPU, BF16)
    q, kv, plan = randn(2, 32, 64), randn(1, 30, 64), AttentionPlan([3, 30], CPU, BF16)
    with pytest.raises(ValueError, match="the last 30, in a KV cache of 30"):
        kernels.attend(q, kv, kv, plan, None, torch.empty_like(q))
    with pytest.raises(ValueError, match="2 queries, 1 positions"):
        kernels.attend(q, kv, kv, plan.last(1), None, torch.empty_like(q))


@native_only
def test_a_product_there_is_no_memory_for_is_torchs() -> None:
    assert BUILT is not None
    if BUILT.cb_can_attend():  # 2^56 bytes for what is not finished yet
        assert BUILT.cb_linear(*(None,) * 6, 2**50, 1280, 32, 0, 2) == 0
    refusing = NativeKernels(SimpleNamespace(cb_can_attend=lambda: 1, cb_linear=lambda *_: 0))  # type: ignore[arg-type]
    x, w = randn(3, 64), randn(32, 64, seed=1)
    out = refusing.linear(x, w, None, torch.empty(3, 32, dtype=BF16))
    assert off_by(out, x.double() @ w.double().t()) < 0.003


@native_only
def test_only_a_library_of_this_version_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert BUILT is not None
    (tmp_path / "_native.1.so").write_bytes(b"of another machine")
    shutil.copy(BUILT._name, tmp_path / "_native.2.so")
    monkeypatch.setattr(built, "__file__", str(tmp_path / "built.py"))
    monkeypatch.setattr(built, "INTERFACE", built.INTERFACE + 1)
    library.cache_clear()
    try:
        assert library() is None
        assert kernels_for(CPU, BF16).name == "torch"
        monkeypatch.setattr(built, "INTERFACE", built.INTERFACE - 1)
        library.cache_clear()
        found = library()
        assert found is not None
        assert Path(found._name).name == "_native.2.so"
    finally:
        library.cache_clear()


@native_only
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    "like", [["-U__linux__"], ["-U__GNUC__", "-D__GNUC__=10"]], ids=["elsewhere", "older compiler"]
)
def test_without_amx_the_rest_is_built(tmp_path: Path, like: list[str]) -> None:
    sources = sorted(Path(built.__file__).parent.glob("*.c"))
    made = tmp_path / "made.so"
    flags = ["-O1", "-shared", "-fPIC", "-fopenmp", *like]
    subprocess.run(["gcc", *flags, *map(str, sources), "-o", str(made), "-lm"], check=True)
    found = load(made)
    assert found is not None
    assert found.cb_can_attend() == 0
    x, w = randn(5, 600), randn(600, seed=1)
    out = NativeKernels(found).norm(x, w, 1e-5, torch.empty_like(x))
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double()
    assert off_by(out, exact) < 0.003


def test_switched_off_or_for_another_type_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_for(CPU, torch.float32).name == "torch"
    monkeypatch.setenv("CACHEBLEND_NATIVE", "0")
    library.cache_clear()
    try:
        assert kernels_for(CPU, BF16).name == "torch"
    finally:
        library.cache_clear()
