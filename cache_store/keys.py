"""Names of chunks, of what was computed from them, and of the model that computed it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

FORMAT_VERSION = 1
"""Version of the chunk file; part of every key, so entries of another version are not found."""

DType = Literal["bf16", "fp16", "fp32", "fp8", "int8", "int4"]
ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""The plain types; only these are computed in."""
CODE_BITS: dict[str, int] = {"fp8": 8, "int8": 8, "int4": 4}
"""The quantised types, with the bits a number takes beside its share of a step and a base."""
GROUP: dict[str, int] = {"fp8": 64, "int8": 64, "int4": 32}
"""How many numbers share a step and a base: of K tokens of one channel, of V channels of one head
and token."""
PART_ALIGNMENT = 64  # of a quantised layer's parts
MAX_TOKEN_ID = 2**32 - 1


def chunk_id(text: str) -> str:
    """64 hex digits naming a chunk's text; the same for every model and in every process."""
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class KVSpec:
    """What KV has to agree in before it can serve a model.

    model, tokenizer: fingerprints of weights and config, and of the tokenizer; not names. dtype:
    what it is stored in, quantised or as it was computed. Raises ValueError for shapes below 1
    and unknown dtypes.
    """

    model: str
    tokenizer: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES and self.dtype not in CODE_BITS:
            raise ValueError(f"unknown KV dtype {self.dtype!r}")
        for name in ("layers", "kv_heads", "head_dim"):
            if not 1 <= getattr(self, name) < 2**31:
                raise ValueError(f"{name} is {getattr(self, name)}")

    @property
    def quantised(self) -> bool:
        return self.dtype in CODE_BITS

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers; where it is quantised, of one of many."""
        many = 64 * GROUP.get(self.dtype, 1)
        return -(-self.layers * self.layer_bytes(many) // many)

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of K and V of one layer."""
        return sum(self.part_bytes(tokens))

    def part_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of K and of V of one layer, as `cache_store.entry` says they are laid out."""
        size = self.kv_heads * self.head_dim
        if self.dtype in ITEM_BYTES:
            return (tokens * size * ITEM_BYTES[self.dtype],) * 2
        group, bits = GROUP[self.dtype], CODE_BITS[self.dtype]
        k_codes = tokens * -(-size * bits // 8)
        v_codes = tokens * self.kv_heads * -(-self.head_dim * bits // 8)
        k_groups = -(-tokens // group) * size
        v_groups = tokens * self.kv_heads * -(-self.head_dim // group)
        return _aligned(4 * k_groups + k_codes), _aligned(4 * v_groups + v_codes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // PART_ALIGNMENT) * PART_ALIGNMENT


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
