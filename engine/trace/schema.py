"""The shape of `ask --json` (schema 1), as a trace has to hold it for a reader to rely on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.numbers import is_number

Spec = Any
"""A check (a function that says what it expects, or ""), a mapping of the keys that must be there,
a list of one spec for all items, or a tuple of a spec and None."""


def text(value: object) -> str:
    return "" if isinstance(value, str) else "text"


def flag(value: object) -> str:
    return "" if isinstance(value, bool) else "true or false"


def count(value: object) -> str:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
    return "" if good else "a whole number, 0 or more"


def number(value: object) -> str:
    return "" if is_number(value) else "a number"


def amount(value: object) -> str:
    return "" if is_number(value) and value >= 0 else "a number, 0 or more"  # type: ignore[operator]


def one_of(*names: str) -> Callable[[object], str]:
    return lambda value: "" if isinstance(value, str) and value in names else " or ".join(names)


def likely(value: object) -> str:
    """One of `top_logprobs`."""
    good = isinstance(value, list | tuple) and len(value) == 2
    good = good and not count(value[0]) and is_number(value[1])  # type: ignore[index]
    return "" if good else "an id and a number"


def sizes(value: object) -> str:
    good = isinstance(value, Mapping) and not any(count(size) for size in value.values())
    return "" if good else "whole numbers by name"


RESULT: Spec = {
    "schema": count,
    "answer": text,
    "finish_reason": text,
    "output_token_ids": [count],
    "model": dict.fromkeys(("name", "fingerprint", "dtype", "device"), text),
    "mode": text,
    "policy": text,
    "ratios": [amount],
    "threshold": (amount, None),
    "transfer": flag,
    "check_layers": [count],
    "skipped_blend": (text, None),
    "prompt": {
        "segments": [
            {
                "kind": one_of("prefix", "chunk", "separator", "history", "suffix"),
                "chunk_id": (text, None),
                "source": (text, None),
                "start": count,
                "end": count,
                "status": one_of("exact", "hit", "miss", "computed", "kept"),
            }
        ],
    },
    "recomputed": {"tokens": count, "fraction": amount, "per_layer": [count]},
    "first_token": ({"id": count, "top_logprobs": [likely]}, None),
    "timing": {
        **dict.fromkeys(("load_model_s", "tokenize_s", "retrieve_s", "ttft_s"), amount),
        **dict.fromkeys(("kv_load_s", "kv_stall_s", "rotate_s", "score_s"), amount),
        **dict.fromkeys(("recompute_s", "decode_s", "total_s"), amount),
        "layers": [{"load_s": amount, "stall_s": amount, "compute_s": amount}],
    },
    "kv": {"bytes_loaded": count, "tier": text, "tiers": sizes},
    "compare": (
        {
            **dict.fromkeys(("ttft_s", "speedup", "kl_first", "kl_mean"), amount),
            "top1_agreement": amount,
            "first_divergence": (count, None),
            "answer": text,
        },
        None,
    ),
    "audit": (dict.fromkeys(("kl_first", "kl_mean", "top1_agreement"), amount), None),
}


def conform(value: object, spec: Spec, where: str) -> None:
    """Raises ValueError, naming the place, where a value is not as its spec has it."""
    if isinstance(spec, tuple):
        if value is not None:
            conform(value, spec[0], where)
    elif isinstance(spec, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} is no object")
        for key, inner in spec.items():
            if key not in value:
                raise ValueError(f"{where} has no {key}")
            conform(value[key], inner, f"{where}.{key}")
    elif isinstance(spec, list):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} is no list")
        for item in value:
            conform(item, spec[0], where)
    elif expected := spec(value):
        raise ValueError(f"{where} is not {expected}")
