"""Tiny checkpoints with quantised weights, packed as the tools do that users have them from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each nibble of an int32 holds
_IN_ORDER = tuple(range(8))

Parts = dict[str, torch.Tensor]


def quantise(model: Path, path: Path, kind: str) -> Path:
    """Writes the model's folder again with its projections quantised; returns `path`."""
    pack, config = KINDS[kind]
    path.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    weights: Parts = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            base = name.removesuffix("weight")
            weights |= {base + part: x.contiguous() for part, x in pack(weight).items()}
        else:
            weights[name] = weight.half()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings |= {"quantization_config": config, "dtype": "float16"}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def _nibbles(codes: torch.Tensor, dim: int, order: tuple[int, ...]) -> torch.Tensor:
    """Eight codes of 4 bits along `dim` in one int32 each."""
    eights = codes.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    packed = sum(eights[..., index] << 4 * place for place, index in enumerate(order))
    return (packed - ((packed >> 31) << 32)).to(torch.int32)  # type: ignore[operator]


def _awq(weight: torch.Tensor) -> Parts:
    """weight [out, in]; codes 0 to 15 with a zero point a group."""
    groups = weight.T.unflatten(0, (-1, GROUP))  # [groups, GROUP, out]
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale + zero).round().clamp(0, 15).flatten(0, 1)
    return {
        "qweight": _nibbles(codes, 1, _AWQ_ORDER),
        "qzeros": _nibbles(zero[:, 0], 1, _AWQ_ORDER),
        "scales": scale[:, 0].half(),
    }


def _gptq(weight: torch.Tensor) -> Parts:
    """weight [out, in]; symmetric: 8 stands for 0, and the zero points are stored less 1."""
    groups = weight.T.unflatten(0, (-1, GROUP))
    scale = (groups.abs().amax(1, keepdim=True) / 7).half().float()
    codes = (groups / scale + 8).round().clamp(0, 15).flatten(0, 1)
    zeros = torch.full_like(scale[:, 0], 7)
    return {
        "qweight": _nibbles(codes, 0, _IN_ORDER),
        "qzeros": _nibbles(zeros, 1, _IN_ORDER),
        "scales": scale[:, 0].half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
    }


def _int8(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


_EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT | {"strategy": "token", "dynamic": True},
        }
    },
}

KINDS: dict[str, tuple[Callable[[torch.Tensor], Parts], dict[str, Any]]] = {
    "awq": (
        _awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "gptq": (
        _gptq,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
        },
    ),
    "int8": (_int8, _W8A8),
}
