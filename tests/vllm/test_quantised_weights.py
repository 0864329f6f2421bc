"""Weights quantised as AWQ, GPTQ and llm-compressor have them, and an fp8 KV cache."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cache_store.errors import UsageError
from engine.blueprint import Blueprint
from engine.model import Decoder
from tests.vllm.quantised_models import KINDS, quantise
from tests.vllm.worlds import Served, make_text

TEXT = make_text()
FIRST, OTHER = [0, 1, 2, 3], [3, 1, 2, 0]


@pytest.fixture(scope="module")
def quantised(
    tiny_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("quantised")

    def get(kind: str) -> Path:
        path = root / kind
        return path if path.exists() else quantise(tiny_dir("llama"), path, kind)

    return get


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [
        ("awq", "float16", 0.01),
        ("gptq", "float16", 0.01),
        ("int8", "bfloat16", 0.1),  # vLLM's kernel takes no float16; activations are rounded, too
    ],
)
def test_quantised_weights_are_blended(
    start: Callable[..., Served],
    quantised: Callable[[str], Path],
    kind: str,
    dtype: str,
    limit: float,
) -> None:
    served = start(quantised(kind), dtype=dtype, extra={"self_test": True})
    assert served.scheduler.connector.off is None
    served.ask(TEXT.prompt(FIRST))  # stores the chunks
    served.forget()
    plain = served.ask(TEXT.prompt(OTHER).token_ids)
    served.forget()
    blended = served.ask(TEXT.prompt(OTHER), ratio="0.999")
    assert len(served.runs) == 1
    hits = [source.status for source in served.runs[0].sources if source.cached]
    assert len(hits) == 4
    assert divergence(plain.logprobs, blended.logprobs) < limit
    if kind == "int8":  # its own noise is nearly what reuse does to this model
        return
    reused = served.ask(TEXT.prompt(OTHER), ratio=0)
    assert divergence(plain.logprobs, reused.logprobs) > 2 * limit  # else nothing would be shown


def test_kv_of_quantised_weights_is_keyed_apart(
    tiny_dir: Callable[[str], Path], quantised: Callable[[str], Path]
) -> None:
    specs = {Blueprint.open(tiny_dir("llama"), quantised=True, dtype="fp16").spec.model}
    specs |= {
        Blueprint.open(quantised(kind), quantised=True, dtype="fp16").spec.model for kind in KINDS
    }
    assert len(specs) == 1 + len(KINDS)


def test_the_torch_engine_says_that_it_does_not_compute_with_them(
    quantised: Callable[[str], Path],
) -> None:
    for opened in (Blueprint.open, Decoder.load):
        with pytest.raises(UsageError, match="does not compute with quantised weights"):
            opened(quantised("awq"))  # type: ignore[operator]


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="fp8 KV needs AVX-512")
def test_an_fp8_kv_cache_is_blended_into(start: Callable[..., Served]) -> None:
    served = start("llama", dtype="float32", kv_cache_dtype="fp8", extra={"self_test": True})
    assert served.scheduler.connector.off is None
    served.ask(TEXT.prompt(FIRST))
    served.forget()
    plain = served.ask(TEXT.prompt(OTHER).token_ids)
    served.forget()
    blended = served.ask(TEXT.prompt(OTHER), ratio="0.999")
    assert len(served.runs) == 1
    served.forget()
    reused = served.ask(TEXT.prompt(OTHER), ratio=0)
    near = divergence(plain.logprobs, blended.logprobs)
    assert near < divergence(plain.logprobs, reused.logprobs) / 2
