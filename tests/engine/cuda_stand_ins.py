"""What stands for CUDA's fused kernels on a CPU: the same contract, by torch's slow paths."""

from unittest.mock import patch

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.bias import causal_lower_right


def flash_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)


def flex_on_cpu(q: Tensor, k: Tensor, v: Tensor, mask: flex.BlockMask) -> Tensor:
    """Not compiled; in float32, since scores are rounded to the type of the inputs otherwise."""
    with patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True):
        out = flex.flex_attention(q.float(), k.float(), v.float(), block_mask=mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out.to(q.dtype)
