"""The inner loops of the decoder: in C where that was built and fits, in torch everywhere else,
on CUDA with its fused kernels.

`kernels_for` chooses. All do the same arithmetic: products accumulated and norms, rotations and
softmax formed in float32, results rounded to the working type.
"""

import torch

from engine.kernels.built import library
from engine.kernels.cuda import cuda_kernels
from engine.kernels.native import NativeKernels
from engine.kernels.plain import PlainKernels
from engine.kernels.protocol import Kernels


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest there are for tensors of this kind, here."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        found = library()
        if found is not None:
            return NativeKernels(found)
    if device.type == "cuda":
        return cuda_kernels(device, dtype)
    return PlainKernels()
