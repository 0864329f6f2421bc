"""Names of chunks, of what was computed from them, and of the model that computed it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

FORMAT_VERSION = 1
"""Version of the chunk file; part of every key, so entries of another version are not found."""

DType = Literal["bf16", "fp16", "fp32"]
ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_TOKEN_ID = 2**32 - 1


def chunk_id(text: str) -> str:
    """64 hex digits naming a chunk's text; the same for every model and in every process."""
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class KVSpec:
    """What KV has to agree in before it can serve a model.

    model, tokenizer: fingerprints of weights and config, and of the tokenizer; not names.
    Raises ValueError for shapes below 1 and unknown dtypes.
    """

    model: str
    tokenizer: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"unknown KV dtype {self.dtype!r}")
        for name in ("layers", "kv_heads", "head_dim"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.layers * self.layer_bytes(1)

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of K and V of one layer."""
        return 2 * tokens * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


def pack_ids(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian 32-bit words. Raises ValueError for what isn't such a number."""
    ids = token_ids if isinstance(token_ids, (list, tuple)) else list(token_ids)
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(f"token ids must be whole numbers from 0 to {MAX_TOKEN_ID}") from error


def unpack_ids(data: bytes | memoryview) -> tuple[int, ...]:
    """The token ids that `pack_ids` packed."""
    return struct.unpack(f"<{len(data) // 4}I", data)


def group_key(spec: KVSpec, token_ids: Sequence[int]) -> str:
    """64 hex digits shared by all entries of one chunk for one model, whatever their context."""
    return _digest(
        b"cacheblend chunk",
        struct.pack("<4I", FORMAT_VERSION, spec.layers, spec.kv_heads, spec.head_dim),
        spec.dtype.encode(),
        spec.model.encode(),
        spec.tokenizer.encode(),
        pack_ids(token_ids),
    )


def entry_key(group: str, context: Sequence[int], regime: str) -> str:
    """64 hex digits naming one entry: a group, the ids it was computed behind, its regime."""
    return _digest(b"cacheblend entry", group.encode(), pack_ids(context), regime.encode())


def _digest(*parts: bytes) -> str:
    hasher = blake3()
    for part in parts:  # each with its length in front: no two lists of parts hash the same bytes
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()
