"""How close a blend comes to full prefill, over questions with retrieved passages.

    python examples/measure_quality.py MODEL_DIR QUESTIONS.json [--questions 20] [--passages 4]

QUESTIONS.json: a list of {"question": ..., "ctxs": [{"title": ..., "text": ...}, ...]}. For every
question its passages are stored behind the prefix; each policy and ratio then answers the same
token ids, and is compared with a full prefill of them, teacher-forced along its greedy answer.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine
from engine.compare import agreement, reference

POLICIES = ("value", "key", "random")
RATIOS = ("0", "0.05", "0.16", "0.5", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    items = json.loads(args.file.read_text("utf-8"))[: args.questions]
    divergences: dict[tuple[str, str], list[float]] = {}
    same: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore.open(Path(folder), limit_bytes=8 * 10**9)
        engine = Engine.load(args.model, store=store, dtype=args.dtype)
        for item in items:
            passages = item["ctxs"][: args.passages]
            chunks = [engine.chunk(f"{p['title']}\n{p['text']}", p["title"]) for p in passages]
            engine.precompute(chunks)
            prompt = engine.prompt(item["question"], chunks)
            full = reference(engine.model, prompt.token_ids, engine.end_ids)
            for policy in POLICIES:
                for ratio in RATIOS:
                    options = BlendOptions.of(policy=policy, ratio=ratio, min_tokens=0)
                    run = engine.prefill(prompt, options, room=16)
                    got = agreement(engine.model, run.cache, run.tables, run.logits, full)
                    divergences.setdefault((policy, ratio), []).append(got.kl_mean)
                    same.setdefault((policy, ratio), []).append(got.top1)
        store.close()
    print(f"{len(items)} questions, {args.passages} passages each, {engine.info.dtype}")
    print("mean KL(full || blend), nats, and top-1 agreement")
    print("ratio   " + "".join(f"{policy:>18}" for policy in POLICIES))
    for ratio in RATIOS:
        cells = [
            f"{statistics.mean(divergences[policy, ratio]):.4f}  "
            f"{statistics.mean(same[policy, ratio]):.3f}"
            for policy in POLICIES
        ]
        print(f"{ratio:8}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
