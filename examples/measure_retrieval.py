"""How often a retriever finds what a question needs, and how long it takes.

    python examples/measure_retrieval.py QUESTIONS.json [--embed-model FOLDER] [--top-k 6]
    python examples/measure_retrieval.py --made 10000

QUESTIONS.json: a list of {"question", "answers": [text], "ctxs": [{"title", "text"}]}. All passages
of all questions are one heap. `answer`: questions of which one of the k passages found has an
answer in it, of those whose own passages have one. `own`: passages of the question's own among its
first ones, as many as it has.

--made: a catalog of so many chunks of 330 words, some frequent and most rare: processor time of the
first search for words, which makes the index, and of a later one in it.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_store.catalog import Catalog, ChunkText
from cache_store.keys import chunk_id
from engine.retrieval import (
    BM25Retriever,
    CatalogChunks,
    EmbedRetriever,
    HybridRetriever,
    Retriever,
    StaticEmbedder,
)


@dataclass(frozen=True)
class Passage:
    chunk_id: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path, nargs="?")
    parser.add_argument("--made", type=int, metavar="CHUNKS")
    parser.add_argument("--embed-model", type=Path)
    parser.add_argument("--top-k", type=int, default=6)
    args = parser.parse_args()
    if args.made is not None:
        measure_words(args.made)
        return
    if args.questions is None:
        parser.error("give a file of questions, or --made")
    questions = json.loads(args.questions.read_text("utf-8"))
    passages = [
        Passage(f"{item['title']}\n{item['text']}", f"{item['title']}\n{item['text']}")
        for question in questions
        for item in question["ctxs"]
    ]
    print(f"{len(questions)} questions, {len({p.chunk_id for p in passages})} passages")
    print(f"{'retriever':10}  answer@{args.top_k}  own    made ms  search ms")
    words = measured("bm25", lambda: BM25Retriever(passages), questions, args.top_k)
    if args.embed_model is not None:
        embedder = StaticEmbedder(args.embed_model)
        meaning = measured(
            "embed", lambda: EmbedRetriever(passages, embedder), questions, args.top_k
        )
        measured("hybrid", lambda: HybridRetriever(words, meaning), questions, args.top_k)


def measure_words(count: int) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        catalog = Catalog(Path(folder) / "catalog.db", read_only=False)
        for document in range(0, count, 50):
            texts = [
                " ".join(f"w{int(60_000 ** rng.random())}" for _ in range(330))
                for _ in range(min(50, count - document))
            ]
            cut = [ChunkText(chunk_id(text), text, 0, len(text), 440) for text in texts]
            catalog.replace_document(str(document), "", "{}", cut)
        kept = Path(folder) / "kept"
        for name in ("first", "later"):
            began = time.process_time()
            hits = BM25Retriever(CatalogChunks(catalog, kept)).search("w1 w2 w30 w400 w5000", 6)
            took = time.process_time() - began
            print(f"{name}: {took:.2f} s, {len(hits)} hits")
        size = sum(file.stat().st_size for file in kept.iterdir())
        print(f"kept: {size / count / 1000:.1f} kB a chunk")


def measured(name: str, make: Any, questions: Sequence[Any], top_k: int) -> Retriever[Passage]:
    began = time.perf_counter()
    retriever: Retriever[Passage] = make()
    made = time.perf_counter() - began
    answered = possible = 0
    own: list[float] = []
    began = time.perf_counter()
    for question in questions:
        mine = {f"{item['title']}\n{item['text']}" for item in question["ctxs"]}
        found = [
            h.chunk.text for h in retriever.search(question["question"], max(top_k, len(mine)))
        ]
        own.append(len(mine.intersection(found[: len(mine)])) / len(mine))
        if has_answer(mine, question["answers"]):
            possible += 1
            answered += has_answer(found[:top_k], question["answers"])
    took = (time.perf_counter() - began) / len(questions)
    print(
        f"{name:10}  {answered / max(1, possible):8.2f}  {sum(own) / len(own):.3f}"
        f"  {1000 * made:7.1f}  {1000 * took:9.2f}"
    )
    return retriever


def has_answer(texts: Any, answers: Sequence[str]) -> bool:
    return any(answer.lower() in text.lower() for answer in answers for text in texts)


if __name__ == "__main__":
    main()
