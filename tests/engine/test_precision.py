"""How far bf16 is from float32 on the real default model, beside transformers' bf16."""

from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.forward import forward

pytestmark = pytest.mark.model

DOCS = Path(__file__).parents[2] / "examples" / "docs"
TOKENS, LAST = 1200, 300  # of each text, and its last ones that are compared


def last_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    model, count = engine.model, len(token_ids)
    tables = model.rope.tables(count)
    return forward(model, model.new_cache(count), token_ids, tables, last=LAST)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(exact || other) in nats of logits [T, vocab]."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_bf16_is_as_close_to_float32_as_transformers_bf16_is(default_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    wide, narrow = (Engine.load(default_model_dir, dtype=dtype) for dtype in ("fp32", "bf16"))
    reference = AutoModelForCausalLM.from_pretrained(
        default_model_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ours, theirs = [], []
    for path in sorted(DOCS.iterdir())[:4]:
        ids = narrow.tokenizer.encode(path.read_text("utf-8"))[:TOKENS]
        exact = last_logits(wide, ids)
        with torch.inference_mode():
            found = reference(torch.tensor([ids]), logits_to_keep=LAST).logits[0]
        ours.append(divergence(exact, last_logits(narrow, ids)))
        theirs.append(divergence(exact, found))
    assert sum(ours) <= 1.5 * sum(theirs)
    assert 0 < sum(theirs) / len(theirs) < 0.005  # or it compares something else
