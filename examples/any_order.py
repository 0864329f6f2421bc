"""The same chunks in three orders, from the Python API.

    python examples/any_order.py MODEL_DIR [STORE_DIR]

MODEL_DIR: a model's folder (`cacheblend models show smollm2-135m` names it). The first prompt finds
nothing stored: it is computed whole, and its chunks are kept. Every later one finds them, whatever
the order, and recomputes 16% of their tokens.
"""

import sys
import tempfile
from pathlib import Path

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine, SamplingOptions

DOCS = Path(__file__).parent / "docs"
QUESTION = "What does the company make?"
ORDERS = {
    "warm-up": (0, 1, 2, 3),
    "first": (0, 1, 2, 3),
    "second": (3, 1, 0, 2),
    "third": (2, 3, 1, 0),
}


def main(model_dir: str, store_dir: str) -> None:
    with ChunkStore.open(Path(store_dir), limit_bytes=2 * 10**9) as store:
        engine = Engine.load(model_dir, store=store)
        texts = [path.read_text("utf-8")[:3000] for path in sorted(DOCS.glob("*.md"))[:4]]
        chunks = [engine.chunk(text, f"text {index}") for index, text in enumerate(texts)]
        print(
            f"{'prompt':10}{'order':14}{'cached':>8}{'recomputed':>12}{'first token':>13}  answer"
        )
        for name, order in ORDERS.items():
            result = engine.ask(
                QUESTION,
                [chunks[index] for index in order],
                blend=BlendOptions.of(ratio="0.16"),
                sampling=SamplingOptions(max_tokens=24),
            )
            cached = sum(
                segment.end - segment.start
                for segment in result.prompt.segments
                if segment.status in ("exact", "hit")
            )
            print(
                f"{name:10}{' '.join(map(str, order)):14}{cached:8}{result.recomputed.tokens:12}"
                f"{result.timing.ttft_s * 1000:10.0f} ms  {' '.join(result.answer.split())[:60]}"
            )


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else folder)
