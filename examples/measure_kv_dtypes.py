"""What quantised KV costs in quality, and saves in bytes.

    python examples/measure_kv_dtypes.py MODEL_DIR QUESTIONS.json [--questions 20] [--passages 4]

QUESTIONS.json: a list of {"question": ..., "ctxs": [{"title": ..., "text": ...}, ...]}. Every
question's passages are computed once and stored in each type; each answer is compared with a full
prefill of the same token ids, teacher-forced along its greedy answer.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from cache_store.keys import KVSpec
from cache_store.store import ChunkStore
from engine import BlendOptions, Engine
from engine.codec import Codec
from engine.compare import agreement, reference
from engine.precompute import Precomputer
from engine.prefill import Prefiller
from engine.prompt import PromptChunk

KINDS = ("auto", "fp8", "int8", "int4")
RATIOS = ("0", "0.16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0, help="Questions to leave out before them.")
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--policy", default=BlendOptions().policy)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--raw", type=Path, help="Append each question's KL to this file.")
    args = parser.parse_args()
    last = args.skip + args.questions
    items = json.loads(args.file.read_text("utf-8"))[args.skip : last]
    engine = Engine.load(args.model, dtype=args.dtype)
    specs = {
        kind: engine.spec if kind == "auto" else replace(engine.spec, dtype=kind) for kind in KINDS
    }
    kl: dict[tuple[str, str], list[float]] = {}
    nbytes = dict.fromkeys(KINDS, 0)
    for item in items:
        passages = item["ctxs"][: args.passages]
        chunks = [engine.chunk(f"{p['title']}\n{p['text']}", p["title"]) for p in passages]
        prompt = engine.prompt(item["question"], chunks)
        full = reference(engine.model, prompt.token_ids, engine.end_ids)
        with tempfile.TemporaryDirectory() as folder, ChunkStore.open(folder) as store:
            put(engine, store, specs, (), [PromptChunk(prompt.prefix_ids)])
            put(engine, store, specs, prompt.prefix_ids, chunks)
            for kind, spec in specs.items():
                nbytes[kind] += sum(e.nbytes for e in store.entries() if e.spec == spec)
                for ratio in RATIOS:
                    options = BlendOptions.of(policy=args.policy, ratio=ratio, min_tokens=0)
                    run = Prefiller(engine.model, store, spec)(prompt, options, room=16)
                    got = agreement(engine.model, run.cache, run.tables, run.logits, full)
                    kl.setdefault((kind, ratio), []).append(got.kl_mean)
        if args.raw is not None:
            row = {f"{kind} {ratio}": values[-1] for (kind, ratio), values in kl.items()}
            with args.raw.open("a", encoding="utf-8") as file:
                print(json.dumps({**row, "bytes": nbytes}), file=file)
    show(len(items), args.passages, engine.info.dtype, args.policy, kl, nbytes)


def put(
    engine: Engine,
    store: ChunkStore,
    specs: dict[str, KVSpec],
    context: tuple[int, ...],
    chunks: list[PromptChunk],
) -> None:
    """Computes chunks behind a context and stores them in every type."""
    computer = Precomputer(engine.model, context)
    for chunk in chunks:
        batch = computer.batch([chunk])
        for spec in specs.values():
            for _, layers in batch.layers(Codec.of(spec, engine.model.dtype)):
                store.put(spec, chunk.token_ids, context, batch.regime, layers)


def show(
    questions: int,
    passages: int,
    dtype: str,
    policy: str,
    kl: dict[tuple[str, str], list[float]],
    nbytes: dict[str, int],
) -> None:
    print(f"{questions} questions, {passages} passages each, {dtype}")
    print(f"mean KL(full || blend), nats, and what the type adds to it; policy {policy}")
    print(f"{'stored':8}{'bytes':>8}" + "".join(f"{ratio:>10}{'added':>10}" for ratio in RATIOS))
    for kind in KINDS:
        line = f"{dtype if kind == 'auto' else kind:8}{nbytes[kind] / nbytes['auto']:>8.3f}"
        for ratio in RATIOS:
            mean = statistics.mean(kl[kind, ratio])
            added = mean - statistics.mean(kl["auto", ratio])
            line += f"{mean:>10.4f}{added:>+10.4f}"
        print(line)


if __name__ == "__main__":
    main()
