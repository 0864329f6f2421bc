"""Safetensors checkpoints, mapped: a weight is read from disk when it is first used."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from cache_store.errors import IntegrityError, NotFoundError
from engine.config import ModelConfig


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]; a bias or norm that a model lacks is None.

    Norms are what the normed values are multiplied by; float32 where a checkpoint stores them less
    1, whose sum the models' own code doesn't round either.
    """

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    o_norm: torch.Tensor | None = None  # of attention's output, after its projection
    down_norm: torch.Tensor | None = None  # of the MLP's output


@dataclass(frozen=True)
class Weights:
    """A whole decoder; `head` is `embed` where the two are tied."""

    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor  # [vocab, hidden]


def weight_files(model_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files, sorted. Raises NotFoundError, IntegrityError."""
    index = model_dir / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise IntegrityError(f"{index}: not a safetensors index ({error})") from error
        if any(Path(name).name != name for name in names):
            raise IntegrityError(f"{index}: names a file outside the model's directory")
        files = [model_dir / name for name in names]
    else:
        files = [model_dir / "model.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise NotFoundError(
            f"{model_dir}: no {missing[0]} there", "weights must be in safetensors files"
        )
    return files


def load_weights(
    model_dir: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> Weights:
    """Maps every weight the decoder uses; copies only where the type or device differs.

    Raises NotFoundError for a missing file, IntegrityError for a missing, misshapen or unreadable
    weight.
    """
    reader = _Checkpoint(weight_files(model_dir), device, dtype)
    c = config
    embed = reader.take("model.embed_tokens.weight", (c.vocab, c.hidden))
    layers = tuple(_layer(reader, c, f"model.layers.{index}.") for index in range(c.layers))
    norm = _norm(reader, c, "model.norm", c.hidden)
    tied = c.tied or "lm_head.weight" not in reader.files
    head = embed if tied else reader.take("lm_head.weight", (c.vocab, c.hidden))
    return Weights(embed, layers, norm, head)


def _norm(reader: "_Checkpoint", c: ModelConfig, name: str, size: int) -> torch.Tensor:
    weight = reader.take(name + ".weight", (size,))
    return weight.float() + 1 if c.centred_norms else weight


def _layer(reader: "_Checkpoint", c: ModelConfig, at: str) -> LayerWeights:
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attn, mlp = at + "self_attn.", at + "mlp."

    def bias(name: str, rows: int, present: bool) -> torch.Tensor | None:
        return reader.take(name + ".bias", (rows,)) if present else None

    # Where there are four norms, what is usually the name of the MLP's is attention's second one.
    after_attention, after_mlp = "post_attention_layernorm", "post_feedforward_layernorm"
    before_mlp = "pre_feedforward_layernorm" if c.four_norms else after_attention
    q_norm = _norm(reader, c, attn + "q_norm", c.head_dim) if c.qk_norm else None
    if c.attention_scale is not None and q_norm is not None:
        # Attention's own factor is head_dim**-0.5; the rest of it goes with the queries.
        q_norm = q_norm * (c.attention_scale * math.sqrt(c.head_dim))
    if c.fused:
        qkv = reader.take(attn + "qkv_proj.weight", (q_rows + 2 * kv_rows, c.hidden))
        q, k, v = torch.split(qkv, [q_rows, kv_rows, kv_rows])
        both = reader.take(mlp + "gate_up_proj.weight", (2 * c.intermediate, c.hidden))
        gate, up = both.chunk(2)
    else:
        q = reader.take(attn + "q_proj.weight", (q_rows, c.hidden))
        k = reader.take(attn + "k_proj.weight", (kv_rows, c.hidden))
        v = reader.take(attn + "v_proj.weight", (kv_rows, c.hidden))
        gate = reader.take(mlp + "gate_proj.weight", (c.intermediate, c.hidden))
        up = reader.take(mlp + "up_proj.weight", (c.intermediate, c.hidden))
    return LayerWeights(
        input_norm=_norm(reader, c, at + "input_layernorm", c.hidden),
        q=q,
        k=k,
        v=v,
        q_bias=bias(attn + "q_proj", q_rows, c.qkv_bias),
        k_bias=bias(attn + "k_proj", kv_rows, c.qkv_bias),
        v_bias=bias(attn + "v_proj", kv_rows, c.qkv_bias),
        q_norm=q_norm,
        k_norm=_norm(reader, c, attn + "k_norm", c.head_dim) if c.qk_norm else None,
        o=reader.take(attn + "o_proj.weight", (c.hidden, q_rows)),
        o_bias=bias(attn + "o_proj", c.hidden, c.o_bias),
        post_norm=_norm(reader, c, at + before_mlp, c.hidden),
        gate=gate,
        up=up,
        down=reader.take(mlp + "down_proj.weight", (c.hidden, c.intermediate)),
        gate_bias=bias(mlp + "gate_proj", c.intermediate, c.mlp_bias),
        up_bias=bias(mlp + "up_proj", c.intermediate, c.mlp_bias),
        down_bias=bias(mlp + "down_proj", c.hidden, c.mlp_bias),
        o_norm=_norm(reader, c, at + after_attention, c.hidden) if c.four_norms else None,
        down_norm=_norm(reader, c, at + after_mlp, c.hidden) if c.four_norms else None,
    )


class _Checkpoint:
    """Finds a weight among the files of a checkpoint and checks its shape."""

    def __init__(self, paths: list[Path], device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.files: dict[str, Any] = {}
        for path in paths:
            try:
                handle: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise IntegrityError(
                    f"{path}: not a readable safetensors file ({error})", "get the model again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                self.files[name] = handle

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self.files:
            raise IntegrityError(
                f"weight {name} is missing from the checkpoint", "get the model again"
            )
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise IntegrityError(
                f"weight {name} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        return tensor.to(self.device, self.dtype)
