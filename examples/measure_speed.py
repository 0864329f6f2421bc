"""Time to first token: full prefill, blend and reuse of the same token ids, side by side.

    python examples/measure_speed.py MODEL_DIR [--tokens 4096] [--pairs 5] [--transformers]

The prompt has a 32-token prefix, 8 equal chunks and a 24-token suffix. All ways run in turn in one
process, warmed up, with the store on local disk and its files in the page cache; the figures are
medians. --transformers adds its own full prefill (sdpa, the same type) of the same ids.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine
from engine.prompt import Prompt, PromptChunk, lay_out

PREFIX, CHUNKS, SUFFIX = 32, 8, 24
RATIOS = ("0.05", "0.16", "0.3")


def standard_prompt(engine: Engine, tokens: int) -> Prompt:
    """Real text, repeated to length; the chunks come in reverse order of their making."""
    folder = Path(__file__).parent / "docs"
    text = "\n\n".join(path.read_text("utf-8") for path in sorted(folder.iterdir()))
    ids = engine.tokenizer.encode(text)
    size = (tokens - PREFIX - SUFFIX) // CHUNKS
    ids = (ids * (1 + tokens // len(ids)))[: PREFIX + CHUNKS * size + SUFFIX]
    body = ids[PREFIX : len(ids) - SUFFIX]
    chunks = [PromptChunk(tuple(body[i : i + size])) for i in range(0, CHUNKS * size, size)]
    return lay_out(ids[:PREFIX], chunks[::-1], (), ids[len(ids) - SUFFIX :])


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def transformers_prefill(model_dir: str, engine: Engine, prompt: Prompt) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=engine.model.dtype, attn_implementation="sdpa"
    )
    model = model.to(engine.model.device).eval()
    ids = torch.tensor([prompt.token_ids], device=engine.model.device)

    @torch.inference_mode()
    def prefill() -> object:
        return model(ids, use_cache=True, logits_to_keep=1).logits.argmax().item()

    return prefill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore.open(Path(folder), limit_bytes=8 * 10**9)
        engine = Engine.load(args.model, store=store, device=args.device, dtype=args.dtype)
        prompt = standard_prompt(engine, args.tokens)
        writer = engine.writer(prompt.prefix_ids)
        writer.write_context()
        for segment in prompt.segments:
            if segment.kind == "chunk":
                writer.write(segment.token_ids)

        def ours(**options: object) -> Callable[[], object]:
            chosen = BlendOptions.of(**options)  # type: ignore[arg-type]
            return lambda: engine.prefill(prompt, chosen).logits.argmax().item()

        ways: dict[str, Callable[[], object]] = {"full prefill": ours(mode="full")}
        if args.transformers:
            ways["transformers"] = transformers_prefill(args.model, engine, prompt)
        ways |= {f"blend {ratio}": ours(ratio=ratio) for ratio in reversed(RATIOS)}
        ways["reuse"] = ours(mode="reuse")
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(args.pairs + 1):
            for name, work in ways.items():
                taken = seconds(work)
                if turn:  # the first round only warms up
                    times[name].append(taken)
        store.close()
    print(
        f"{len(prompt.token_ids)} tokens, {engine.info.dtype} on {engine.info.device}, "
        f"{torch.get_num_threads()} threads, median of {args.pairs}"
    )
    full = times["full prefill"]
    for name, values in times.items():
        pairs = statistics.median(f / v for f, v in zip(full, values, strict=True))
        spread = f"{min(values):.3f}-{max(values):.3f}"
        print(f"{name:14}{statistics.median(values):8.3f} s  ({spread})  full/this {pairs:6.2f}")


if __name__ == "__main__":
    main()
