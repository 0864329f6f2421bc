"""What recording a run costs: time to first token with the record that is always kept of it and
without, in turns, and what making and writing a trace takes after the answer.

    python examples/measure_trace.py .cache/models/smollm2-135m --tokens 4096 --pairs 10
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine, PromptChunk, SamplingOptions
from engine.prompt import Prompt, lay_out
from engine.timing import Stopwatch, Timer
from engine.trace import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--policies", default="question,value")
    wanted = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkStore.open(Path(folder) / "store", limit_bytes=10 * 10**9) as store,
    ):
        engine = Engine.load(wanted.model, store=store)
        prompt = stored_prompt(engine, wanted.tokens)
        for policy in wanted.policies.split(","):
            options = BlendOptions.of(policy=policy, min_tokens=0)
            print(measured(engine, prompt, options, wanted.pairs))
            print(afterwards(engine, prompt, options, Path(folder) / "run.cbtrace"))


def stored_prompt(engine: Engine, tokens: int) -> Prompt:
    """The standard layout: prefix 32, 8 chunks in another order than stored, suffix 24."""
    known = engine.tokenizer.special_ids
    usual = [token for token in range(engine.tokenizer.vocab_size) if token not in known]
    ids = iter([*usual, *usual] * (1 + tokens // len(usual)))
    prefix = tuple(next(ids) for _ in range(32))
    length = max(1, (tokens - 56) // 8)
    chunks = [PromptChunk(tuple(next(ids) for _ in range(length))) for _ in range(8)]
    engine.writer(prefix, prefix).write_missing(chunks)
    return lay_out(prefix, chunks[::-1], (), tuple(next(ids) for _ in range(24)))


def measured(engine: Engine, prompt: Prompt, options: BlendOptions, pairs: int) -> str:
    """Prefills with and without, in turns: medians, and the median of what the pairs differ by."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(pairs + 1):
        for recording in (True, False) if number % 2 else (False, True):
            began = time.perf_counter()
            if recording:
                engine.prefill(prompt, options, room=4)
            else:
                with unrecorded():
                    engine.prefill(prompt, options, room=4)
            if number:  # the first round only warms up
                seconds[recording].append(time.perf_counter() - began)
    both = zip(seconds[True], seconds[False], strict=True)
    more = statistics.median(a / b - 1 for a, b in both)
    with_ms, without_ms = (1e3 * statistics.median(seconds[k]) for k in (True, False))
    return (
        f"{options.policy}, {len(prompt.token_ids)} tokens, {pairs} pairs: {without_ms:.1f} ms "
        f"unrecorded, {with_ms:.1f} ms recorded, {more:+.2%}"
    )


def afterwards(engine: Engine, prompt: Prompt, options: BlendOptions, path: Path) -> str:
    """What comes after the answer, in CPU time."""
    sampling = SamplingOptions(max_tokens=1)

    def taken(action: Callable[[], object]) -> float:
        began = time.thread_time()
        action()
        return 1e3 * (time.thread_time() - began)

    result = engine.generate(prompt, blend=options, sampling=sampling, trace="basic", save=False)
    assert result.trace is not None
    trace = result.trace
    writing = taken(lambda: write(trace, path))
    return f"  written in {writing:.1f} ms: {path.stat().st_size:,} bytes"


@contextmanager
def unrecorded() -> Iterator[None]:
    """Stopwatches that only add up, without a record by layer."""
    marks = ("reading", "computing", "between", "through")
    kept = {name: getattr(Stopwatch, name) for name in marks}
    leave = Timer.__exit__
    try:
        for name in marks:
            setattr(Stopwatch, name, lambda *args: None)
        Timer.__exit__ = lambda self, *args: self.add(  # type: ignore[method-assign]
            time.perf_counter() - self._began
        )
        yield
    finally:
        for name, mark in kept.items():
            setattr(Stopwatch, name, mark)
        Timer.__exit__ = leave  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
