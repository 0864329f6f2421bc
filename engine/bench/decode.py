"""Decoding: output tokens a second over a cache of some length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from cache_store.errors import UsageError
from engine.api import Engine
from engine.bench.layout import text_ids
from engine.bench.measure import in_turn, paired, telling
from engine.bench.peers import Peer
from engine.generate import generate
from engine.options import BlendOptions, SamplingOptions
from engine.prefill import Prefilled
from engine.prompt import lay_out


@dataclass(frozen=True)
class DecodeRow:
    """seconds: of the rounds, for `output` tokens after the first one; over_ours: this rate over
    ours, paired round by round."""

    tokens: int
    way: str
    output: int
    seconds: tuple[float, ...]
    tokens_per_s: float
    over_ours: float


def check_room(lengths: Sequence[int], output: int, context: int) -> None:
    """Raises UsageError for a prompt that leaves no room for the output."""
    for length in lengths:
        if length < 1 or length + output + 1 > context:
            raise UsageError(
                f"a prompt of {length} tokens and {output} of output do not fit the model's "
                f"context of {context}",
                "measure fewer tokens",
            )


def measure_decode(
    engine: Engine,
    lengths: Sequence[int],
    output: int,
    pairs: int,
    peers: Sequence[Peer],
    text: str | None,
    on_round: Callable[[str], None],
) -> list[DecodeRow]:
    """Greedy decoding behind prompts of these lengths, ours first. Raises UsageError for a prompt
    that leaves no room for the output."""
    check_room(lengths, output, engine.model.config.context)
    rows: list[DecodeRow] = []
    for length in lengths:
        ids = text_ids(engine.tokenizer, length, text)
        run = engine.prefill(
            lay_out((), (), (), ids), BlendOptions.of(mode="full"), room=output + 1
        )
        ways: dict[str, Callable[[], float]] = {"ours": partial(_ours, engine, run, output)}
        ways |= {peer.name: partial(peer.decode, ids, output) for peer in peers}
        taken = in_turn(ways, pairs, telling(on_round, f"{length} tokens", pairs))
        rows += [
            DecodeRow(
                length,
                name,
                output,
                tuple(seconds),
                output / median(seconds),
                paired(taken["ours"], seconds).median,
            )
            for name, seconds in taken.items()
        ]
    return rows


def _ours(engine: Engine, run: Prefilled, output: int) -> float:
    """Decodes over the same filled cache again: what an earlier round appended is overwritten."""
    run.cache.length = run.cache.capacity - output - 1
    sampling, stream = SamplingOptions(max_tokens=output + 1), engine.tokenizer.stream()
    return generate(
        engine.model, run.cache, run.tables, run.logits, sampling, stream, end_ids=()
    ).seconds
