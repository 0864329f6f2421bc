"""Decoding: stop strings, sampling, limits; greedy decoding against transformers."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cache_store.errors import UsageError
from engine.forward import forward
from engine.generate import Sampler, StopText, generate
from engine.model import Decoder
from engine.options import SamplingOptions
from tests.engine.tiny_models import TINY, build


class Letters:
    """A stream that shows each id as a letter, and one more at the end."""

    def push(self, token_id: int) -> str:
        return chr(97 + token_id % 26)

    def finish(self) -> str:
        return "!"


def stopped(pieces: list[str], *stops: str) -> tuple[str, str, bool]:
    shown: list[str] = []
    text = StopText(stops, shown.append)
    done = any(text.push(piece) for piece in pieces)
    return text.finish(), "".join(shown), done


def test_a_stop_string_ends_the_text_and_is_not_shown() -> None:
    assert stopped(["one ", "two", " three"], "two") == ("one ", "one ", True)
    assert stopped(["a#", "# b"], "##") == ("a", "a", True)
    assert stopped(["a#", "b#"], "##") == ("a#b#", "a#b#", False)
    assert stopped(["x STOP y END"], "END", "STOP") == ("x ", "x ", True)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    shown: list[str] = []
    text = StopText(["</answer>"], shown.append)
    text.push("done</ans")
    assert shown == ["done"]
    text.push("wers>")
    assert "".join(shown) == "done</answers>"


@given(
    st.lists(st.text("ab#", max_size=4), max_size=12),
    st.lists(st.text("ab#", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streamed_text_is_the_text_before_the_first_stop(
    pieces: list[str], stops: list[str]
) -> None:
    whole, shown, done = stopped(pieces, *stops)
    assert whole == shown
    assert not any(stop in whole for stop in stops)
    assert done == any(stop in "".join(pieces) for stop in stops)
    assert "".join(pieces).startswith(whole)
    if not done:
        assert whole == "".join(pieces)


def test_sampling_keeps_to_top_k_and_top_p() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def drawn(**options: float) -> set[int]:
        sampler = Sampler(SamplingOptions(temperature=1.0, **options))  # type: ignore[arg-type]
        return {sampler(logits) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.5) == {0}
    assert drawn(top_p=0.51) == {0, 1}
    assert drawn(top_p=0.01) == {0}
    assert drawn(top_k=3, top_p=0.9) == {0, 1, 2}
    assert Sampler(SamplingOptions())(logits) == 0


def test_sampling_repeats_with_its_seed_and_follows_the_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])

    def draws(seed: int, temperature: float) -> list[int]:
        sampler = Sampler(SamplingOptions(temperature=temperature, seed=seed))
        return [sampler(logits) for _ in range(3000)]

    assert draws(1, 0.7) == draws(1, 0.7) != draws(2, 0.7)
    share = draws(3, 0.5).count(0) / 3000
    assert abs(share - float((logits / 0.5).softmax(0)[0])) < 0.03


@pytest.mark.parametrize(
    "options",
    [{"max_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0},
     {"top_p": 1.1}, {"top_k": -1}, {"stop": ("",)}],
)  # fmt: skip
def test_bad_sampling_options_are_refused(options: dict) -> None:
    with pytest.raises(UsageError):
        SamplingOptions(**options)


@pytest.fixture
def decoder(tmp_path: Path) -> tuple[Decoder, torch.nn.Module]:
    oracle = build(TINY[0], tmp_path)
    return Decoder.load(tmp_path, "cpu", "fp32"), oracle


def run(model: Decoder, ids: list[int], capacity: int, end_ids=(), **options: object):
    cache = model.new_cache(capacity)
    tables = model.rope.tables(len(ids), capacity)
    logits = forward(model, cache, ids, tables)
    chosen = SamplingOptions(**options)  # type: ignore[arg-type]
    return generate(model, cache, tables, logits, chosen, Letters(), end_ids)


def test_greedy_decoding_equals_transformers(decoder) -> None:
    model, oracle = decoder
    ids = list(range(5, 40))
    with torch.no_grad():
        expected = oracle.generate(
            torch.tensor([ids]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )[0, 35:].tolist()
    got = run(model, ids, 100, max_tokens=20)
    assert list(got.token_ids) == expected
    assert got.finish_reason == "length"
    assert got.text == "".join(chr(97 + token % 26) for token in expected) + "!"
    ended = run(model, ids, 100, end_ids=(expected[5],), max_tokens=20)
    assert list(ended.token_ids) == expected[: expected.index(expected[5])]
    assert ended.finish_reason == "stop"


def test_decoding_ends_where_the_context_does(decoder) -> None:
    model, _ = decoder
    got = run(model, list(range(5, 40)), 38, max_tokens=20)
    assert len(got.token_ids) == 3
    assert got.finish_reason == "length"


def test_stop_string_ends_decoding(decoder) -> None:
    model, _ = decoder
    whole = run(model, list(range(5, 40)), 100, max_tokens=20)
    stop = whole.text[6:8]
    got = run(model, list(range(5, 40)), 100, max_tokens=20, stop=(stop,))
    assert got.text == whole.text[: whole.text.index(stop)]
    assert got.finish_reason == "stop"
    assert len(got.token_ids) <= 8


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([0.5, 0.51, 0.3])
    for temperature in (1e-40, 1e-300, 1e-8):
        assert Sampler(SamplingOptions(temperature=temperature))(logits) == 1


def test_the_first_token_is_known_even_if_it_ends_the_answer(decoder) -> None:
    model, _ = decoder
    whole = run(model, list(range(5, 40)), 100, max_tokens=3)
    ended = run(model, list(range(5, 40)), 100, end_ids=(whole.token_ids[0],), max_tokens=3)
    assert ended.token_ids == ()
    assert ended.first_id == whole.first_id == whole.token_ids[0]
