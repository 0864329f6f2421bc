"""How much attention keys get: the kernel in C against torch, and both against float64."""

from random import Random

import pytest
import torch

from engine.attention import AttentionPlan
from engine.kernels.built import library
from engine.kernels.cuda import CudaKernels
from engine.kernels.native import NativeKernels
from engine.kernels.plain import PlainKernels
from engine.kernels.protocol import Kernels
from tests.engine.test_kernels import BF16, BUILT, CPU, native_only, randn, without_tiles

KERNELS = [
    pytest.param(PlainKernels, id="torch"),
    pytest.param(lambda: NativeKernels(BUILT), id="native", marks=native_only),  # type: ignore[arg-type]
    pytest.param(without_tiles, id="native-rows", marks=native_only),
    pytest.param(lambda: CudaKernels(None, None), id="cuda"),
]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    made: Kernels = request.param()
    return made


def exact_mass(
    q: torch.Tensor, k: torch.Tensor, positions: list[int], window: int | None, counted: int
) -> torch.Tensor:
    """In float64, query by query as the words have it."""
    heads, shared = q.shape[1], q.shape[1] // k.shape[0]
    out = torch.zeros(heads, k.shape[1], dtype=torch.float64)
    for row in range(len(positions) - counted, len(positions)):
        end = positions[row] + 1
        first = 0 if window is None else max(0, end - window)
        keys = k[:, first:end].double().repeat_interleave(shared, 0)
        scores = torch.einsum("hd,hkd->hk", q[row].double(), keys)
        out[:, first:end] += (scores / q.shape[2] ** 0.5).softmax(1)
    return out


def assert_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == exact.shape
    assert torch.equal(found[exact == 0], torch.zeros_like(found[exact == 0]))
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "counted", "length", "heads", "kv_heads", "dim", "window"),
    [
        (1, 1, 1, 9, 3, 64, None),
        (1, 1, 200, 32, 1, 64, None),
        (24, 24, 500, 9, 3, 64, None),
        (24, 1, 129, 9, 3, 64, None),
        (60, 7, 128, 4, 4, 128, None),
        (70, 70, 333, 8, 2, 96, None),
        (40, 33, 161, 6, 2, 256, None),
        (3, 2, 300, 200, 1, 32, None),  # more heads than the kernel takes queries at a time
        (300, 300, 700, 4, 2, 64, None),
        (60, 50, 700, 9, 3, 64, 50),
        (90, 90, 300, 4, 1, 64, 1),
        (60, 60, 3000, 9, 3, 64, 20),  # some queries see nothing of whole blocks
        (60, 60, 300, 9, 3, 64, 2**32),
        (20, 20, 50, 4, 2, 48, None),  # a size the tiles don't cover
    ],
)
@pytest.mark.parametrize("run", [False, True], ids=["scattered", "last"])
def test_mass_is_exact_by_position(
    kernels: Kernels,
    tokens: int,
    counted: int,
    length: int,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    run: bool,
) -> None:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(tokens))
    positions = list(range(length - tokens, length)) if run else sorted(order[:tokens].tolist())
    q, k = randn(tokens, heads, dim, seed=1), randn(kv_heads, length + 40, dim, seed=2)
    k[:, positions[-1] + 1 :] = torch.nan  # what no query may see must not matter, whatever it is
    if window is not None:
        k[:, : max(0, positions[-counted] - window + 1)] = torch.nan
    found = kernels.mass(q, k, AttentionPlan(positions, CPU, BF16), window, counted)
    assert_near(found, exact_mass(q, k, positions, window, counted))


def test_sharp_equal_and_huge_scores(kernels: Kernels) -> None:
    plan, k = AttentionPlan(list(range(0, 400, 5)), CPU, BF16), randn(1, 400, 64, scale=8)
    for q in (randn(80, 2, 64, seed=6, scale=8), torch.zeros(80, 2, 64, dtype=BF16)):
        assert_near(kernels.mass(q, k, plan, None, 80), exact_mass(q, k, plan.bounds, None, 80))
    huge = torch.full((80, 2, 64), 1e15, dtype=BF16)  # scores of some 1e17
    found = kernels.mass(huge, k, plan, None, 80)
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(1), torch.tensor([80.0, 80.0]))


def test_a_query_that_is_no_number_spoils_its_head_alone(kernels: Kernels) -> None:
    plan = AttentionPlan(list(range(300, 324)), CPU, BF16)
    q, k = randn(24, 4, 64, seed=1), randn(2, 324, 64, seed=2)
    q[5, 1] = torch.nan
    found = kernels.mass(q, k, plan, None, 24)
    assert found[1, :300].isnan().all()
    others = [0, 2, 3]
    assert_near(found[others], exact_mass(q, k, plan.bounds, None, 24)[others])


def test_nobody_asked_and_too_many_asked(kernels: Kernels) -> None:
    plan, q, k = AttentionPlan([3, 9], CPU, BF16), randn(2, 4, 64), randn(2, 12, 64)
    assert torch.equal(kernels.mass(q, k, plan, None, 0), torch.zeros(4, 12))
    for counted in (3, -1):
        with pytest.raises(ValueError, match="of 2 queries, 2 positions"):
            kernels.mass(q, k, plan, None, counted)
    with pytest.raises(ValueError, match="the last 9, in a KV cache of 9"):
        kernels.mass(q, k[:, :9], plan, None, 2)
    with pytest.raises(ValueError, match="don't go together"):
        kernels.mass(q, randn(3, 12, 64), plan, None, 2)


def test_torch_keeps_its_memory_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, plan = randn(90, 6, 64), randn(2, 500, 64), AttentionPlan([*range(5, 455, 5)], CPU, BF16)
    whole = PlainKernels().mass(q, k, plan, 70, 80)
    monkeypatch.setattr("engine.attention._SCORES", 10_000)  # six queries at a time
    torch.testing.assert_close(PlainKernels().mass(q, k, plan, 70, 80), whole)


@native_only
def test_threads_and_other_calls_make_no_difference() -> None:
    found = library()
    assert found is not None
    kernels, before = NativeKernels(found), torch.get_num_threads()
    q, k = randn(61, 9, 64, seed=1, scale=3), randn(3, 1500, 64, seed=2)
    plan, results = AttentionPlan(list(range(1439, 1500)), CPU, BF16), []
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            results.append(kernels.mass(q, k, plan, None, 61))
            kernels.mass(q[:7], k, AttentionPlan([*range(7)], CPU, BF16), 3, 7)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@native_only
def test_any_sizes_as_torch_has_it() -> None:
    random, kernels, plain = Random(0), NativeKernels(library()), PlainKernels()  # type: ignore[arg-type]
    for seed in range(60):
        kv_heads, shared = random.choice([1, 2, 3, 5]), random.choice([1, 2, 3, 7])
        dim, length = random.choice([32, 64, 96, 128, 256]), random.choice([1, 40, 128, 700, 1300])
        tokens = random.randint(1, min(length, random.choice([1, 30, 400])))
        positions = sorted(random.sample(range(length), tokens))
        counted, window = random.randint(1, tokens), random.choice([None, None, 1, 33, 500])
        q = randn(tokens, kv_heads * shared, dim, seed=seed, scale=random.choice([0.1, 1, 5]))
        k = randn(kv_heads, length + random.randint(0, 200), dim, seed=seed + 1)
        plan = AttentionPlan(positions, CPU, BF16)
        found = kernels.mass(q, k, plan, window, counted)
        exact = plain.mass(q, k, plan, window, counted)
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-9)
        assert torch.equal(found == 0, exact == 0) or bool((found - exact).abs().max() < 1e-9)


@native_only
def test_keys_that_lie_otherwise_are_torchs() -> None:
    kernels, plan = NativeKernels(library()), AttentionPlan([*range(40, 60)], CPU, BF16)  # type: ignore[arg-type]
    q, wide = randn(20, 4, 64), randn(60, 2, 64, seed=1)
    found = kernels.mass(q, wide.transpose(0, 1), plan, None, 20)  # positions, then heads
    assert_near(found, exact_mass(q, wide.transpose(0, 1), plan.bounds, None, 20))
    part = randn(20, 8, 64, seed=3)[:, ::2]  # every other head
    found = kernels.mass(part, wide.transpose(0, 1).contiguous(), plan, None, 20)
    assert_near(found, exact_mass(part, wide.transpose(0, 1), plan.bounds, None, 20))
