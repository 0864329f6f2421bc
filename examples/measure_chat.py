"""How long a conversation's turns take to their first token, against full prefills of the same ids.

    python examples/measure_chat.py [--model FOLDER] [--rounds 5] [--top-k 3]

Three questions over examples/docs, as `cacheblend chat` asks them: what was said stays in the KV
cache, each turn's new chunks come from the store and are blended. Each round is a conversation of
its own; beside every turn the same ids are prefilled in full in the same process. Medians, in ms.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cache_store.store import ChunkStore
from engine import BlendOptions, Conversation, Engine, PromptChunk, SamplingOptions
from engine.compare import reference
from engine.conversation import TurnResult

HERE = Path(__file__).parent
QUESTIONS = (
    "How long may a hotel stay be before it needs an approval?",
    "Who approves purchases above 500 euros?",
    "What does the Gannet 12 weigh?",
)
SAMPLING = SamplingOptions(max_tokens=24)


def pieces(engine: Engine) -> list[tuple[str, str]]:
    """(file, text) of the examples' documents, cut at blank lines into some 300 tokens each."""
    found = []
    for path in sorted((HERE / "docs").iterdir()):
        held = ""
        for paragraph in path.read_text("utf-8").split("\n\n"):
            if held and len(engine.tokenizer.encode(held + paragraph)) > 300:
                found.append((path.name, held))
                held = ""
            held += paragraph + "\n\n"
        found.append((path.name, held))
    return found


def best(found: list[tuple[str, str]], question: str, count: int) -> list[tuple[str, str]]:
    """Those with most of the question's words."""
    words = {word.strip("?.,").lower() for word in question.split() if len(word) > 3}
    return sorted(found, key=lambda one: -sum(word in one[1].lower() for word in words))[:count]


def turns(engine: Engine, given: list[list[PromptChunk]]) -> Iterator[TurnResult]:
    conversation = Conversation(engine)
    for question, chunks in zip(QUESTIONS, given, strict=True):
        yield conversation.ask(
            question, chunks, blend=BlendOptions(), sampling=SAMPLING, save=False
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE.parent / ".cache/models/smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkStore.open(Path(folder) / "store", limit_bytes=4 * 10**9) as store,
    ):
        engine = Engine.load(options.model, store=store, threads=options.threads)
        found = pieces(engine)
        given = [
            [engine.chunk(text, name) for name, text in best(found, question, options.top_k)]
            for question in QUESTIONS
        ]
        engine.precompute([chunk for chunks in given for chunk in chunks])
        measure(engine, given, options.rounds)


def measure(engine: Engine, given: list[list[PromptChunk]], rounds: int) -> None:
    list(turns(engine, given))  # warms up
    kept: list[list[float]] = [[] for _ in QUESTIONS]
    full: list[list[float]] = [[] for _ in QUESTIONS]
    last: list[TurnResult] = []
    for _ in range(rounds):
        last = []
        for number, done in enumerate(turns(engine, given)):
            kept[number].append(1e3 * done.result.timing.ttft_s)
            ids = done.result.prompt.token_ids
            full[number].append(1e3 * reference(engine.model, ids, engine.end_ids, tokens=1).ttft_s)
            last.append(done)
    print("turn  tokens    kept     new  computed   chat ms   full ms   times")
    for number, done in enumerate(last):
        ours, whole = statistics.median(kept[number]), statistics.median(full[number])
        tokens = len(done.result.prompt.token_ids)
        print(
            f"{number + 1:4} {tokens:7} {done.kept_tokens:7} {done.new_tokens:7}"
            f" {done.computed_tokens:9} {ours:9.0f} {whole:9.0f} {whole / ours:7.1f}"
        )


if __name__ == "__main__":
    main()
