"""Traces made up for tests: small ones with known numbers, and long ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
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

HARBOUR = (
    "The harbour of Fennimar lies open to the east. Its pilot boat leaves at six, when the tide "
    "turns, and Orla, the harbour master, keeps the log of every voyage in a blue book.\n"
)
LAMP = (
    "The lamp of the lighthouse was lit in 1871. It burns oil; its keeper sleeps by day and is "
    "paid in silver, twice a year, behind the customs house.\n"
)
ROPES = "A rope is coiled with the sun. Wet ropes are hung, never stowed: they rot in the dark.\n"


def split(text: str) -> list[bytes]:
    """Words with the space before them, as a tokenizer would cut them."""
    return [part.encode() for part in re.findall(r" ?[^\s]{1,7}|\n|\s", text)]


def table(tokens: Sequence[bytes], computed: Sequence[int] | None = None) -> TokenTable:
    ends = np.cumsum([len(token) for token in tokens]).astype(np.int32)
    ids = np.array([1000 + number for number in range(len(tokens))], dtype=np.int32)
    layers = np.array(computed if computed is not None else [0] * len(tokens), dtype=np.int16)
    return TokenTable(ids, b"".join(tokens), ends, layers)


def result(segments: list[dict[str, Any]], count: int, **more: Any) -> dict[str, Any]:
    cached = sum(
        s["end"] - s["start"]
        for s in segments
        if s["kind"] == "chunk" and s["status"] in ("hit", "exact")
    )
    chosen = more.pop("chosen", 0)
    timing = {
        "load_model_s": 0.4,
        "tokenize_s": 0.002,
        "retrieve_s": 0.001,
        "ttft_s": 0.2,
        "kv_load_s": 0.05,
        "kv_stall_s": 0.004,
        "rotate_s": 0.012,
        "score_s": 0.03,
        "recompute_s": 0.15,
        "decode_s": 0.3,
        "total_s": 0.95,
        "layers": [],
    }
    found = {
        "schema": 1,
        "answer": "Orla signs off.",
        "finish_reason": "stop",
        "output_token_ids": [7, 8, 9],
        "model": {"name": "tiny", "fingerprint": "f" * 64, "dtype": "bf16", "device": "cpu"},
        "mode": "blend",
        "policy": "value",
        "ratios": [0.16],
        "threshold": None,
        "transfer": False,
        "check_layers": [1],
        "skipped_blend": None,
        "prompt": {"token_ids": list(range(1000, 1000 + count)), "segments": segments},
        "recomputed": {
            "tokens": chosen,
            "fraction": chosen / cached if cached else 0.0,
            "per_layer": [chosen] * more.pop("layers", 2),
        },
        "first_token": {"id": 7, "top_logprobs": [[7, -0.1]]},
        "timing": timing,
        "kv": {"bytes_loaded": 1000, "tier": "disk", "tiers": {"disk": 1000}},
        "compare": None,
        "audit": None,
    }
    return found | more


def segment(kind: str, start: int, end: int, status: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "chunk_id": more.get("chunk_id"),
        "source": more.get("source"),
        "start": start,
        "end": end,
        "status": status,
    }


def make(
    texts: Sequence[tuple[str, str, str, str]],
    *,
    layers: int = 30,
    ratio: float = 0.16,
    seed: int = 0,
    name: str = "20260101-120000-value",
    deviations: bool = True,
    attention: bool = True,
    compare: bool = True,
    tokens: Sequence[Sequence[bytes]] | None = None,
) -> Trace:
    """A run over texts of (kind, source, status, text), with the value policy at layer 1."""
    random = np.random.default_rng(seed)
    pieces = tokens or [split(text) for *_, text in texts]
    segments, at = [], 0
    for (kind, source, status, _), part in zip(texts, pieces, strict=True):
        chunk = f"{at:02d}{source}".encode().hex().ljust(64, "0")[:64] if kind == "chunk" else None
        place = segment(kind, at, at + len(part), status, chunk_id=chunk, source=source or None)
        segments.append(place)
        at += len(part)
    flat = [token for part in pieces for token in part]
    computed = np.full(at, layers, dtype=np.int16)
    scored: list[int] = []
    for one in segments:
        if one["status"] in ("hit", "exact"):
            computed[one["start"] : one["end"]] = 2 if one["status"] == "hit" else 0
            if one["status"] == "hit" and one["kind"] == "chunk":
                scored += range(one["start"], one["end"])
    positions = np.array(scored, dtype=np.int32)
    scores = (random.pareto(1.5, len(positions)) * 0.01).astype(np.float32)
    cached = sum(
        s["end"] - s["start"]
        for s in segments
        if s["status"] in ("hit", "exact") and s["kind"] == "chunk"
    )
    chosen = min(len(positions), -(-int(cached * ratio * 1000) // 1000))
    stage = Stage(1, positions, scores, chosen)
    computed[stage.selected()] = layers
    spans, clock = [], 0.0
    for layer in range(layers):
        compute = 0.012 if layer < 2 else 0.0045 + 0.0005 * (layer % 3)
        score = 0.006 if layer == 1 else 0.0
        stall = 0.002 if layer in (0, 2) else 0.0
        spans.append(LayerSpan(clock, layer * 0.003, 0.0028, stall, 0.0004, score, compute))
        clock += stall + 0.0004 + score + compute
    words = [" Or", "la", " signs", " off", " every", " voyage", "."]
    answer = tuple(AnswerToken(50 + n, word) for n, word in enumerate(words))
    reference = tuple(
        AnswerToken(50 + n + (n == 4), " each" if n == 4 else word, 0.001 * (n + 1) ** 2)
        for n, word in enumerate(words)
    )
    more: dict[str, Any] = {}
    if compare:
        more["compare"] = {
            "ttft_s": 0.88,
            "speedup": 0.88 / clock,
            "kl_first": 0.001,
            "kl_mean": 0.0213,
            "top1_agreement": 0.94,
            "first_divergence": 4,
            "answer": "".join(token.text for token in reference),
        }
    found = result(segments, at, layers=layers, chosen=chosen, ratios=[ratio], **more)
    found["timing"] = found["timing"] | {"ttft_s": clock + 0.004}
    trace = Trace(
        id=name,
        created=1_767_268_800.0,
        level="full" if deviations else "basic",
        question="Who signs off?",
        result=found,
        layers=layers,
        tokens=replace(table(flat), computed=computed),
        stages=(stage,),
        spans=tuple(spans),
        phases=(
            Phase("open", -0.021, -0.004),
            Phase("tokenize", -0.004, -0.002),
            Phase("find", 0.0, 0.002),
            Phase("layers", 0.002, clock),
            Phase("logits", clock, clock + 0.004),
            Phase("decode", clock + 0.004, clock + 0.12),
        ),
        answer=answer,
        reference=reference if compare else (),
        bound=0.21,
        reuse_ttft_s=0.11,
    )
    if attention and len(positions):
        rows = (random.pareto(2, (4, len(positions))) * 0.001).astype(np.float32)
        trace = replace(
            trace,
            attention_layers=(8, 12, 16, 20),
            attention_positions=positions,
            attention=rows,
        )
    if deviations and len(positions):
        shares = np.linspace(1, 0.2, layers)[:, None]
        noise = random.pareto(1.5, (layers, len(positions))) * 0.01
        v = (scores[None, :] * shares + noise * (1 - shares)).astype(np.float32)
        v *= np.linspace(0.1, 1, layers)[:, None].astype(np.float32)
        trace = replace(trace, deviations=Deviations(tuple(range(layers)), positions, v * 2, v))
    return trace


def prompt_texts(repeat: int = 1) -> list[tuple[str, str, str, str]]:
    return [
        ("prefix", "", "exact", "You answer from the documents, briefly.\n"),
        ("chunk", "docs/lamp.md", "exact", LAMP * repeat),
        ("separator", "", "computed", "\n\n"),
        ("chunk", "docs/harbour.md", "hit", HARBOUR * repeat),
        ("separator", "", "computed", "\n\n"),
        ("chunk", "docs/ropes.txt", "miss", ROPES * repeat),
        ("separator", "", "computed", "\n\n"),
        ("chunk", "docs/log.md", "hit", (HARBOUR + ROPES) * repeat),
        ("suffix", "", "computed", "\nWho signs off? Answer:"),
    ]


def example(**options: Any) -> Trace:
    """A run of a few hundred tokens with everything recorded."""
    return make(prompt_texts(2), **options)


def long(tokens: int = 32_000, **options: Any) -> Trace:
    """A run of about so many tokens."""
    per = len(split(HARBOUR + ROPES))
    count = max(1, tokens // (per * 20))
    texts = [("prefix", "", "exact", "You answer briefly.\n")]
    for number in range(20):
        status = "exact" if not number else "hit"
        texts.append(("chunk", f"docs/part-{number}.md", status, (HARBOUR + ROPES) * count))
    texts.append(("suffix", "", "computed", "\nWho signs off?"))
    return make(texts, **options)
