"""A trace made by hand, small enough to know every number of it."""

from dataclasses import replace
from typing import Any

import numpy as np

from engine.trace.record import (
    AnswerToken,
    Deviations,
    LayerSpan,
    Phase,
    Stage,
    TokenTable,
    Trace,
)

PIECES = (b"<s>", b"One", b" two", b"", b"\xf0\x9f", b"\x8e\x89", b"?", b"[/INST]")
IDS = (1, 300, 70_000, 5, 250, 251, 9, 2)


def result() -> dict[str, Any]:
    def segment(kind: str, start: int, end: int, status: str) -> dict[str, Any]:
        name, source = ("ab" * 32, "one.md") if kind == "chunk" else (None, None)
        place = {"start": start, "end": end}
        return {"kind": kind, "chunk_id": name, "source": source, **place, "status": status}

    seconds = ("load_model_s", "tokenize_s", "retrieve_s", "ttft_s", "kv_load_s", "kv_stall_s")
    more = ("rotate_s", "score_s", "recompute_s", "decode_s", "total_s")
    return {
        "schema": 1,
        "answer": "Yes 🎉",
        "finish_reason": "stop",
        "output_token_ids": [7, 8],
        "model": {"name": "tiny", "fingerprint": "f" * 64, "dtype": "fp32", "device": "cpu"},
        "mode": "blend",
        "policy": "value",
        "ratios": [0.4],
        "threshold": None,
        "transfer": False,
        "check_layers": [1],
        "skipped_blend": None,
        "prompt": {
            "token_ids": list(IDS),
            "segments": [
                segment("prefix", 0, 1, "exact"),
                segment("chunk", 1, 6, "hit"),
                segment("suffix", 6, 8, "computed"),
            ],
        },
        "recomputed": {"tokens": 2, "fraction": 0.4, "per_layer": [5, 5, 2]},
        "first_token": {"id": 7, "top_logprobs": [[7, -0.5], [8, -1.5]]},
        "timing": {
            **dict.fromkeys((*seconds, *more), 0.25),
            "layers": [{"load_s": 0.1, "stall_s": 0.0, "compute_s": 0.2}] * 3,
        },
        "kv": {"bytes_loaded": 1234, "tier": "disk", "tiers": {"disk": 1234}},
        "compare": None,
        "audit": None,
    }


def make(**changes: Any) -> Trace:
    """Two of five cached tokens recomputed, of level `full`."""
    scores = np.array([0.5, 2.0, 0.0, 2.0, 1.0], np.float32)
    cached = np.arange(1, 6, dtype=np.int32)
    trace = Trace(
        id="20260102T030405.000006-ab12",
        created=1_767_323_045.5,
        level="full",
        question="Is it \ttrue? [bold] 🎉\x1b[2J",
        result=result(),
        layers=3,
        tokens=TokenTable(
            np.array(IDS, np.int32),
            b"".join(PIECES),
            np.cumsum([len(piece) for piece in PIECES]).astype(np.int32),
            np.array([0, 2, 3, 2, 3, 2, 3, 3], np.int16),
        ),
        stages=(Stage(1, cached, scores, 2),),
        spans=tuple(
            LayerSpan(0.01 * i, 0.005 * i, 0.004, 0.001, 0.002, 0.003, 0.02) for i in range(3)
        ),
        phases=(Phase("tokenize", -0.5, 0.0), Phase("layers", 0.0, 0.03)),
        answer=(AnswerToken(7, "Yes", 0.125), AnswerToken(8, " 🎉")),
        reference=(AnswerToken(7, "Yes", 0.125), AnswerToken(9, "!", 0.5)),
        attention_layers=(1, 2),
        attention_positions=cached,
        attention=np.array([[0.5, 0.25, 0.25, 0, 0], [0, 0, 0, 0, 1]], np.float32),
        deviations=Deviations(
            (1, 2), cached, np.arange(10, dtype=np.float32).reshape(2, 5), np.ones((2, 5), "f4")
        ),
        bound=0.375,
    )
    return replace(trace, **changes)
