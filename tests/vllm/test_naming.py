"""Requests that name their chunks, each in its way, on a real vLLM."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import SamplingParams

from cache_store.store import ChunkStore
from engine.api import Engine
from engine.options import BlendOptions
from engine.vllm.prompts import PromptBuilder, extra_args, tokens_prompt
from engine.vllm.settings import ConnectorSettings, open_blueprint
from tests.engine.tiny_tokenizers import SENTENCES
from tests.vllm.worlds import Served

SEP = " # # "
CHUNKS = tuple(f"{start} " + " ".join(SENTENCES[:3]) for start in ("One.", "Two,", "3:"))
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def served(start: Callable[..., Served]) -> Served:
    return start("llama", extra={"ratio": 0.2})


@pytest.fixture(scope="module")
def builder(served: Served) -> PromptBuilder:
    return PromptBuilder.open(served.model_dir, served.store_dir, dtype="fp32")


def text(order: Sequence[int], question: str = "What is kept at the gate?") -> str:
    return SEP.join(["Be brief.", *(CHUNKS[index] for index in order), question])


def answer(served: Served, prompt: Any, extra: dict[str, Any] | None = None) -> Any:
    served.forget()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, extra_args=extra)
    (output,) = served.llm.generate([prompt], params, use_tqdm=False)
    served.settle()
    return output


def told(output: Any) -> dict[str, Any]:
    """What the connector says it did for a request."""
    found: dict[str, Any] = output.kv_transfer_params["cacheblend"]
    return found


def statuses(output: Any) -> list[str]:
    return [s["status"] for s in told(output)["segments"] if s["kind"] == "chunk"]


def test_a_text_with_separators_is_reused_in_any_order(served: Served) -> None:
    first = answer(served, text((0, 1, 2)))
    assert statuses(first) == ["miss", "miss", "miss"]
    again = answer(served, text((0, 1, 2)))
    # Behind what it was stored behind, the first one needs nothing.
    assert statuses(again) == ["exact", "hit", "hit"]
    other = answer(served, text((2, 0, 1), "Who signs in?"))
    assert statuses(other) == ["exact", "hit", "hit"]
    twice = answer(served, text((1, 1)))
    assert statuses(twice) == ["exact", "hit"]
    assert told(other)["recomputed"]["tokens"] > 0


def test_ids_with_separators_and_messages_are_the_same_chunks(served: Served) -> None:
    tokenizer = served.llm.get_tokenizer()
    ids = tokenizer.encode(text((2, 1)), add_special_tokens=False)
    assert "miss" not in statuses(answer(served, {"prompt_token_ids": ids}))
    served.forget()
    (output,) = served.llm.chat(
        [{"role": "user", "content": "# # " + text((1, 0)) + SEP}],
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
        chat_template=CHAT,
        use_tqdm=False,
    )
    served.settle()
    # The template's beginning is the prefix here, and its end the question.
    assert statuses(output) == ["miss", "hit", "hit", "miss"]


def test_one_separator_names_no_chunk(served: Served) -> None:
    for prompt in ("Be brief. # # Why?", "Why?", "# #", " # # "):
        assert answer(served, prompt).kv_transfer_params is None


def test_what_the_torch_engine_stores_is_a_hit_here_and_the_other_way_round(
    served: Served, builder: PromptBuilder
) -> None:
    with ChunkStore.open(served.store_dir) as store:
        engine = Engine.load(
            served.model_dir, device="cpu", dtype="fp32", store=store, name="another name"
        )
        engine.precompute([engine.chunk("Stored by torch. " + CHUNKS[0])])
        prompt = builder.ask("Why?", ["Stored by torch. " + CHUNKS[0], "Only here. " + CHUNKS[1]])
        output = answer(served, tokens_prompt(prompt), extra_args(prompt, ratio=0))
        assert statuses(output) == ["exact", "miss"]
        assert told(output)["ratios"] == [0.0]
        again = answer(served, tokens_prompt(prompt), extra_args(prompt, ratio=0))
        assert statuses(again) == ["exact", "hit"]
        result = engine.ask(
            "Who?",
            [engine.chunk("Only here. " + CHUNKS[1]), engine.chunk("new")],
            blend=BlendOptions.of(min_tokens=0),
            save=False,
        )
        chunks = [s.status for s in result.prompt.segments if s.kind == "chunk"]
        assert chunks == ["exact", "miss"]
        # What is stored is known by vLLM's own path of the model, too.
        settings = ConnectorSettings(served.store_dir)
        config = served.llm.llm_engine.vllm_config.model_config
        assert open_blueprint(settings, config.model, "fp32").spec == engine.spec


def test_chunks_are_named_by_their_ids(served: Served, builder: PromptBuilder) -> None:
    texts = ["Named by id. " + text for text in CHUNKS[:2]]
    prompt = builder.ask("Why?", texts)
    answer(served, tokens_prompt(prompt), extra_args(prompt))
    names = [s.chunk_id for s in prompt.segments if s.kind == "chunk"]
    other = builder.ask("Why?", texts[::-1])
    wish = {"kv_transfer_params": {"cacheblend": {"chunks": names[::-1]}}}
    output = answer(served, tokens_prompt(other), wish)
    assert statuses(output) == ["exact", "hit"]
    assert [s["chunk_id"] for s in told(output)["segments"] if s["kind"] == "chunk"] == names[::-1]


def test_a_request_says_what_is_done_with_it(served: Served) -> None:
    def ask(**wishes: Any) -> dict[str, Any]:
        wish = {"kv_transfer_params": {"cacheblend": wishes}}
        return told(answer(served, text((2, 1, 0)), wish))

    answer(served, text((0, 1, 2)))
    assert ask(ratio=0.5)["recomputed"]["fraction"] == pytest.approx(0.5, abs=0.01)
    assert ask(mode="reuse")["recomputed"]["tokens"] == 0
    assert ask(ratio=0.1, policy="first-k")["policy"] == "first-k"
    assert ask(min_tokens=100_000)["status"] == "full"
    new = text((2, 1, 0)).replace("boiler", "pump")
    unsaved = {"kv_transfer_params": {"cacheblend": {"save": False}}}
    assert [statuses(answer(served, new, unsaved)) for _ in range(2)] == [["miss"] * 3] * 2


@pytest.mark.parametrize(
    "wish",
    [
        {"ratio": 2},
        {"segments": [{"kind": "chunk", "tokens": 10**9}]},
        {"segments": 3},
        {"chunks": ["dead" * 16]},
        {"nonsense": 1},
    ],
)
def test_a_request_that_asks_for_what_cant_be_is_answered_as_a_plain_one(
    served: Served, wish: dict[str, Any]
) -> None:
    plain = answer(served, "Be brief. Why?")
    output = answer(served, "Be brief. Why?", {"kv_transfer_params": {"cacheblend": wish}})
    assert output.kv_transfer_params is None
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
