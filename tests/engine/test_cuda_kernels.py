"""How CUDA's kernels are chosen, tried and given up: on the CPU, and on a GPU where one is."""

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import AttentionPlan
from engine.kernels import cuda, flex, kernels_for
from engine.kernels.cuda import CudaKernels, cuda_kernels
from engine.kernels.flex import TILE, block_mask
from engine.model import Decoder
from tests.engine.blend_world import make_world
from tests.engine.cuda_stand_ins import flash_on_cpu, flex_on_cpu
from tests.engine.test_kernels import BF16, CPU, exact_attention, off_by, randn
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def scattered(tokens: int, length: int, seed: int = 0) -> list[int]:
    return sorted(random.Random(seed).sample(range(length), tokens))


class Case:
    """Queries at `positions` over keys 0..last, and what attention makes of them."""

    def __init__(
        self,
        positions: list[int],
        window: int | None = None,
        shape: tuple[int, int, int] = (4, 2, 64),
    ) -> None:
        heads, kv_heads, dim = shape
        self.plan, self.window = AttentionPlan(positions, CPU, BF16), window
        self.q = randn(len(positions), heads, dim, seed=1)
        self.k = randn(kv_heads, positions[-1] + 9, dim, seed=2)
        self.v = randn(kv_heads, positions[-1] + 9, dim, seed=3)

    def off(self, kernels: CudaKernels) -> float:
        q, k, v = self.q, self.k, self.v
        out = kernels.attend(q, k, v, self.plan, self.window, torch.empty_like(q))
        return off_by(out, exact_attention(q, k, v, self.plan.bounds, self.window))


@pytest.fixture
def for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention however little there is to do."""
    monkeypatch.setattr(cuda, "_is_much", lambda plan, window: True)


# Tiles of FlexAttention


@pytest.mark.parametrize("window", [None, 1, 100, 130, 5000])
@pytest.mark.parametrize(
    "positions",
    [
        [0, 1],
        scattered(127, 300),
        scattered(128, 128),
        scattered(300, 1000),
        [*scattered(200, 800), *range(2000, 2100)],
        list(range(640)),
        list(range(300, 700)),
    ],
    ids=lambda positions: f"{len(positions)}-{positions[-1]}",
)
def test_tiles_leave_out_nothing_visible_and_take_whole_what_is(
    positions: list[int], window: int | None
) -> None:
    mask = block_mask(AttentionPlan(positions, CPU, BF16), window)
    queries, keys = torch.tensor(positions)[:, None], torch.arange(positions[-1] + 1)
    visible = (keys <= queries) & (keys > queries - (window or len(keys)))
    seen = mask.mask_mod(CPU, CPU, torch.arange(len(positions))[:, None], keys)  # type: ignore[arg-type]
    assert torch.equal(seen, visible)
    assert mask.seq_lengths == tuple(visible.shape)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    listed = [
        [set(row[:n].tolist()) for row, n in zip(rows[0, 0], number[0, 0], strict=True)]
        for rows, number in (
            (mask.kv_indices, mask.kv_num_blocks),
            (mask.full_kv_indices, mask.full_kv_num_blocks),
        )
    ]
    for row, (some, whole) in enumerate(zip(*listed, strict=True)):
        assert not some & whole
        for tile in range(-(-len(keys) // TILE)):
            part = visible[row * TILE : (row + 1) * TILE, tile * TILE : (tile + 1) * TILE]
            if tile in whole:
                assert part.all()
                assert part.shape[1] == TILE
            elif tile not in some:
                assert not part.any()


def test_flex_attention_is_compiled_once_for_all_lengths_and_windows(
    for_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    function = torch.nn.attention.flex_attention.flex_attention
    torch.compiler.reset()
    traced = torch.compile(function, dynamic=True, fullgraph=True, backend=count)
    monkeypatch.setattr(flex, "_compiled", lambda: traced)
    kernels = CudaKernels(None, flex.flex_attention)
    cases = [(400, 900, None), (300, 768, 50), (640, 2000, None), (512, 513, 700), (384, 384, 9)]
    for tokens, length, window in cases:
        memory = randn(4 * 2 * 3 * (length + 20) * 32 + 100)  # as in a KV cache of 4 layers
        k, v = memory[:-100].view(2, 4, 3, length + 20, 32)[:, 1]
        with torch.inference_mode():  # where a model makes queries and plans, but not its KV cache
            plan, q = AttentionPlan(scattered(tokens, length), CPU, BF16), randn(tokens, 6, 32)
            kernels.attend(q, k, v, plan, window, torch.empty_like(q))
    assert kernels.notes == ()
    assert len(graphs) == 1


# What is used for what


def test_each_kernel_gets_what_it_is_for(for_all: None) -> None:
    used: list[tuple[str, int, int]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        used.append(("flash", q.shape[2], k.shape[2]))
        return flash_on_cpu(q, k, v)

    def flexible(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        used.append(("flex", q.shape[2], k.shape[2]))
        return flex_on_cpu(q, k, v, mask)  # type: ignore[arg-type]

    kernels = CudaKernels(flash, flexible)
    assert kernels._flex_works(Case([0]).q, Case([0]).k)
    used.clear()
    expected = {
        "flash": [
            (list(range(50)), None, 50),
            (list(range(20, 50)), None, 50),
            (list(range(50)), 50, 50),  # a window nothing falls out of
            ([49], None, 50),
            ([49], 20, 20),
        ],
        "flex": [(scattered(40, 90), None, 0), (list(range(50)), 20, 50)],
    }
    for name, cases in expected.items():
        for positions, window, keys in cases:
            assert Case(positions, window).off(kernels) < 0.003
            assert used.pop() == (name, len(positions), keys or positions[-1] + 1)
            assert not used


def test_heads_flash_attention_has_no_kernel_for_do_without(for_all: None) -> None:
    def none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise AssertionError("not for this size")

    for dim in (20, 320):
        assert Case(list(range(40)), shape=(4, 2, dim)).off(CudaKernels(none, None)) < 0.003


def test_little_work_is_not_worth_compiling() -> None:
    def never(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        raise AssertionError("compiled")

    kernels = CudaKernels(None, never)
    assert Case(scattered(300, 600)).off(kernels) < 0.003
    assert not cuda._is_much(AttentionPlan(scattered(256, 10**6), CPU, BF16), None)
    long = AttentionPlan(scattered(2000, 8000), CPU, BF16)
    assert cuda._is_much(long, None)
    assert not cuda._is_much(long, 100)


def test_a_plan_keeps_its_masks(for_all: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, case = CudaKernels(None, flex_on_cpu), Case(scattered(40, 90))
    case.off(kernels)
    monkeypatch.setattr(cuda, "block_mask", lambda plan, window: pytest.fail("made again"))
    assert case.off(kernels) < 0.003


def test_the_last_of_a_plan_are_not_sent_to_the_device_again() -> None:
    plan = AttentionPlan(scattered(40, 90), CPU, BF16)
    last = plan.last(3)
    assert last.bounds == last.positions.tolist() == plan.bounds[-3:]
    assert last.positions.data_ptr() == plan.positions[-3:].data_ptr()


# What doesn't work


def failing(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    raise RuntimeError("Failed to find C compiler.\nPlease specify one.")


def leaking(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    return flash_on_cpu(q, k, v)  # as if the queries were the last positions


def empty(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (failing, "RuntimeError: Failed to find C compiler."),
        (leaking, "an example comes out "),
        (empty, "an example comes out nan off"),
    ],
)
def test_flex_attention_that_fails_is_given_up_and_the_answer_is_right(
    for_all: None, broken: cuda.Flex, said: str
) -> None:
    tries = 0

    def counted(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        nonlocal tries
        tries += 1
        return broken(q, k, v, mask)  # type: ignore[arg-type]

    kernels = CudaKernels(None, counted)
    assert kernels.notes == ()
    for _ in range(2):
        assert Case(scattered(40, 90)).off(kernels) < 0.003
    assert tries == 1
    assert len(kernels.notes) == 1
    assert kernels.notes[0].startswith(f"FlexAttention is not used: {said}")


def test_flex_attention_that_fails_after_the_example_is_given_up(for_all: None) -> None:
    def later(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        if q.shape[2] == 40:
            raise OSError("disk full")
        return flex_on_cpu(q, k, v, mask)  # type: ignore[arg-type]

    kernels = CudaKernels(None, later)
    assert Case(scattered(50, 90)).off(kernels) < 0.003
    assert kernels.notes == ()
    assert Case(scattered(40, 90)).off(kernels) < 0.003
    assert kernels.notes == ("FlexAttention is not used: OSError: disk full",)


def test_memory_that_runs_out_is_no_fault_of_flex_attention(for_all: None) -> None:
    def later(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        if q.shape[2] == 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return flex_on_cpu(q, k, v, mask)  # type: ignore[arg-type]

    kernels = CudaKernels(None, later)
    with pytest.raises(torch.OutOfMemoryError):
        Case(scattered(40, 90)).off(kernels)
    assert kernels.notes == ()
    assert Case(scattered(50, 90)).off(kernels) < 0.003


def aligned_top_left(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("there", "flash", "noted"),
    [
        (False, flash_on_cpu, "not there for torch.bfloat16 on this device"),
        (True, aligned_top_left, "an example comes out "),
        (True, flash_on_cpu, None),
    ],
)
def test_flash_attention_is_used_where_it_is_there_and_right(
    monkeypatch: pytest.MonkeyPatch, there: bool, flash: cuda.Flash, noted: str | None
) -> None:
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda params: there)
    monkeypatch.setattr(cuda, "flash_attention", flash)
    monkeypatch.setattr(cuda, "find_spec", lambda name: None)
    kernels = cuda_kernels(CPU, BF16)
    assert (kernels._flash is None) == (noted is not None)
    assert kernels.notes[-1] == "FlexAttention is not used: triton is not installed"
    assert len(kernels.notes) == (1 if noted is None else 2)
    assert noted is None or kernels.notes[0].startswith(f"FlashAttention is not used: {noted}")
    assert Case(list(range(20, 60))).off(kernels) < 0.003


# Whole models


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "gemma3"])
def test_blends_keep_their_identities(
    for_all: None, name: str, fused: bool, tmp_path: Path
) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    world.model.kernels = (
        CudaKernels(flash_on_cpu, flex_on_cpu) if fused else CudaKernels(None, None)
    )
    world.ingest()
    prompt = world.prompt((2, 0, 3, 1))
    for options in (dict(ratio=1), dict(ratio="0.999999999"), dict(mode="full")):
        run = world.prefill(prompt, **options)
        assert float((run.logits[0] - world.full(prompt)).abs().max()) < 1e-4
    world.model.kernels = kernels_for(CPU, torch.float32)
    assert world.model.kernels.name == "torch"


# On a GPU


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention for a few hundred queries."""
    monkeypatch.setattr(cuda, "MANY", 0)


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(9, 3, 64), (8, 8, 128), (32, 8, 128), (6, 2, 80)])
def test_attention_on_a_gpu(many: None, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    gpu = torch.device("cuda")
    kernels = kernels_for(gpu, dtype)
    for positions, window in [
        (scattered(400, 1500), None),
        (scattered(300, 900), 70),
        (scattered(40, 900), None),
        (list(range(300)), None),
        (list(range(200, 500)), None),
        (list(range(500)), 70),
        ([700], None),
        ([700], 70),
    ]:
        case = Case(positions, window, shape)
        case.k[:, positions[-1] + 1 :] = case.v[:, positions[-1] + 1 :] = torch.nan
        q, k, v = (x.to(gpu, dtype) for x in (case.q, case.k, case.v))
        plan, results = AttentionPlan(positions, gpu, dtype), []
        with torch.inference_mode():
            for check in ("default", "error"):  # a wait for the device, once all is made
                torch.cuda.set_sync_debug_mode(check)
                try:
                    results.append(kernels.attend(q, k, v, plan, window, torch.empty_like(q)))
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        exact = exact_attention(case.q, case.k, case.v, positions, window)
        for out in results:
            assert off_by(out.cpu(), exact) < (0.001 if dtype == torch.float32 else 0.005)
    modern = torch.cuda.get_device_capability() >= (8, 0) and find_spec("triton") is not None
    assert kernels.notes == () or dtype == torch.float32 or not modern


@pytest.mark.cuda
@on_gpu
@pytest.mark.parametrize("name", ["llama-head-dim", "mistral-window", "qwen3", "gemma3"])
def test_blends_on_a_gpu_keep_their_identities(many: None, name: str, tmp_path: Path) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    world.model = Decoder.load(tmp_path / "model", "cuda", "fp32")
    world.ingest()
    prompt = world.prompt((2, 0, 3, 1))
    for options in (dict(ratio=1), dict(ratio="0.999999999"), dict(mode="full")):
        run = world.prefill(prompt, **options)
        assert float((run.logits[0].cpu() - world.full(prompt)).abs().max()) < 1e-3


@pytest.mark.cuda
@on_gpu
def test_bf16_on_a_gpu_is_near_float32(many: None, tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama-head-dim"], tmp_path)
    world.model = Decoder.load(tmp_path / "model", "cuda", "bf16")
    prompt = world.prompt((2, 0, 3, 1))
    exact = world.full(prompt).log_softmax(0)
    found = world.prefill(prompt, mode="full").logits[0].cpu().log_softmax(0)
    assert float((exact.exp() * (exact - found)).sum()) < 0.005
