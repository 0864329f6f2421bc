import pytest
import torch

from engine.vllm.fp8 import in_fp8


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_come_back_as_the_next_smaller_fp8_ones(
    kind: torch.dtype, dtype: torch.dtype
) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    x *= torch.logspace(-6, 5, 4096).to(dtype)
    y = in_fp8(x, kind)
    assert y.dtype == dtype
    most = torch.finfo(kind).max
    assert torch.equal(y.float().to(kind).float(), y.float())  # nothing is lost any more
    inside = x.float().clamp(-most, most)
    assert (y.float().abs() <= inside.abs()).all()
    nearest = inside.to(kind).float()
    assert ((y.float() == nearest) | (nearest.abs() > inside.abs())).all()
    assert torch.equal(in_fp8(y, kind), y)
