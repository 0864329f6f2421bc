"""How far bf16 is from float32 on real models, beside transformers' bf16."""

from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.forward import forward

pytestmark = pytest.mark.model

DOCS = Path(__file__).parents[2] / "examples" / "docs"
TOKENS = 1200  # of each text
# of which the last ones are compared: fewer where a vocabulary is large
LAST = {"default_model_dir": 300, "gemma_model_dir": 60}


def last_logits(engine: Engine, token_ids: list[int], last: int) -> torch.Tensor:
    model, count = engine.model, len(token_ids)
    tables = model.rope.tables(count)
    return forward(model, model.new_cache(count), token_ids, tables, last=last)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL(exact || other) in nats of logits [T, vocab]."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("which", LAST)
def test_bf16_is_as_close_to_float32_as_transformers_bf16_is(
    which: str, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    model_dir, last = request.getfixturevalue(which), LAST[which]
    wide, narrow = (Engine.load(model_dir, dtype=dtype) for dtype in ("fp32", "bf16"))
    reference = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    ours, theirs = [], []
    for path in sorted(DOCS.iterdir())[:4]:
        ids = narrow.tokenizer.encode(path.read_text("utf-8"))[:TOKENS]
        exact = last_logits(wide, ids, last)
        with torch.inference_mode():
            found = reference(torch.tensor([ids]), logits_to_keep=last).logits[0]
        ours.append(divergence(exact, last_logits(narrow, ids, last)))
        theirs.append(divergence(exact, found))
    assert sum(ours) <= 1.5 * sum(theirs)
    assert 0 < sum(theirs) / len(theirs) < 0.005  # or it compares something else
