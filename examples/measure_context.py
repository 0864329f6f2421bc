"""What chunks are computed behind, and what that costs: the prefix, its first token, or nothing.

    python examples/measure_context.py MODEL_DIR QUESTIONS.json [--questions 20] [--passages 4]

QUESTIONS.json: a list of {"question": ..., "ctxs": [{"title": ..., "text": ...}, ...]}. Every
question's passages are stored behind each context, in a store of its own, and answered behind the
same system prompt, and behind another one. Each answer is compared with a full prefill of the same
token ids, teacher-forced along its greedy answer.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine
from engine.compare import agreement, reference
from engine.context import CONTEXT_KINDS
from engine.prefill import Prefiller
from engine.prompt import lay_out
from engine.template import PromptTemplate

SYSTEM = "Reply in one short sentence, using only facts found in the text below."
RATIOS = ("0", "0.16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--policy", default=BlendOptions().policy)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    items = json.loads(args.file.read_text("utf-8"))[: args.questions]
    divergences: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(args.model, dtype=args.dtype)
        blueprint, own = engine.blueprint, engine.template
        changed = PromptTemplate.load(blueprint.path, engine.tokenizer, system=SYSTEM)
        stores = {kind: ChunkStore.open(Path(folder) / kind) for kind in CONTEXT_KINDS}
        for item in items:
            passages = item["ctxs"][: args.passages]
            chunks = [engine.chunk(f"{p['title']}\n{p['text']}", p["title"]) for p in passages]
            for kind, store in stores.items():
                engine.store = store
                engine.writer(own.context(kind), own.prefix).write_missing(chunks)
            for name, template in (("same", own), ("changed", changed)):
                suffix = template.suffix(item["question"])
                prompt = lay_out(template.prefix, chunks, template.separator, suffix)
                full = reference(engine.model, prompt.token_ids, engine.end_ids)
                for kind, store in stores.items():
                    prefill = Prefiller(engine.model, store, engine.spec)
                    for ratio in RATIOS:
                        options = BlendOptions.of(policy=args.policy, ratio=ratio, min_tokens=0)
                        run = prefill(prompt, options, room=16)
                        got = agreement(engine.model, run.cache, run.tables, run.logits, full)
                        divergences.setdefault((kind, name, ratio), []).append(got.kl_mean)
        for store in stores.values():
            store.close()
    print(f"{len(items)} questions, {args.passages} passages each, {engine.info.dtype}")
    print(f"mean KL(full || blend), nats; policy {args.policy}")
    print(f"{'':8}{'same system prompt':>20}{'another one':>20}")
    print("context " + "".join(f"{ratio:>10}" for _ in range(2) for ratio in RATIOS))
    for kind in CONTEXT_KINDS:
        means = [
            statistics.mean(divergences[kind, name, ratio])
            for name in ("same", "changed")
            for ratio in RATIOS
        ]
        print(f"{kind:8}" + "".join(f"{mean:>10.4f}" for mean in means))


if __name__ == "__main__":
    main()
