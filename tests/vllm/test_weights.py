"""A server whose weights change while it runs."""

from collections.abc import Callable
from typing import Any

from engine.vllm.steps import WEIGHTS_CHANGED
from tests.vllm.worlds import make_text


def test_other_weights_end_the_use_of_what_is_stored(start: Callable[..., Any]) -> None:
    served = start(max_num_batched_tokens=64)  # so that what is computed is so in slices
    text = make_text()

    def why_off() -> str | None:
        (said,) = served.llm.collective_rpc("why_blending_is_off")
        return said

    def said_of(answer: Any) -> dict[str, Any]:
        return (answer.raw.kv_transfer_params or {}).get("cacheblend", {})

    served.ask(text.prompt([0, 1, 2, 3]))
    assert said_of(served.ask(text.prompt([2, 0, 1])))["status"] == "blended"
    served.llm.collective_rpc("sleep")
    assert served.connector.steps.asleep
    served.llm.collective_rpc("wake_up")
    assert not served.connector.steps.asleep
    assert why_off() is None
    full = served.ask(text.prompt([1, 2, 0]).token_ids, steps=3)

    served.llm.collective_rpc("reload_weights")
    served.forget()
    assert why_off() == WEIGHTS_CHANGED
    first = served.ask(text.prompt([1, 2, 0]), steps=3)
    assert (said_of(first)["status"], said_of(first)["why"]) == ("failed", WEIGHTS_CHANGED)
    assert first.token_ids == full.token_ids
    assert (first.logprobs - full.logprobs).abs().max() < 1e-3
    assert said_of(served.ask(text.prompt([2, 1, 0]))) == {}, "the scheduler knows it, too"
