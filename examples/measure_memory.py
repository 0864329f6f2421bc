"""Memory a blend takes beside the mapped weights: anonymous memory above that of `import torch`.

    python examples/measure_memory.py MODEL_DIR [--tokens 4096] [--loader NAME] [--json]

The prompt is laid out as in `cacheblend bench`; its chunks are computed and stored by another
process. Only memory that is no file's counts (RssAnon, read every few milliseconds): mapped weights
and stored KV are pages of files, which the system may drop and read again. Linux.
"""

import argparse
import json
import multiprocessing
import re
import tempfile
import threading
from pathlib import Path

import torch

from cache_store.store import ChunkStore
from engine import BlendOptions, Engine
from engine.bench.layout import standard_prompt, text_ids


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise SystemExit("/proc/self/status has no RssAnon: this takes a newer Linux")
    return int(found[1]) * 1024


class Peak:
    """The most `anonymous` memory while the block runs."""

    def __enter__(self) -> "Peak":
        self.bytes, self._over = anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.bytes = max(self.bytes, anonymous())


def fill(model: str, dtype: str, folder: Path, tokens: int) -> None:
    with ChunkStore.open(folder, limit_bytes=8 * 10**9) as store:
        engine = Engine.load(model, store=store, dtype=dtype)
        prompt = standard_prompt(text_ids(engine.tokenizer, tokens))
        chunks = [segment for segment in prompt.segments if segment.kind == "chunk"]
        engine.writer(prompt.prefix_ids).write_missing(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", default="bf16")  # as the file has it: others are copies
    parser.add_argument("--loader", default="pipelined")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    before = anonymous()  # torch is imported
    with tempfile.TemporaryDirectory() as name:
        task = (args.model, args.dtype, Path(name), args.tokens)
        other = multiprocessing.get_context("spawn").Process(target=fill, args=task)
        other.start()
        other.join()
        if other.exitcode:
            raise SystemExit("the chunks could not be stored")
        with ChunkStore.open(Path(name)) as store:
            engine = Engine.load(args.model, store=store, dtype=args.dtype)
            prompt = standard_prompt(text_ids(engine.tokenizer, args.tokens))
            loaded = anonymous() - before
            with Peak() as peak:
                run = engine.prefill(prompt, BlendOptions.of(loader=args.loader))
    kv = sum(part.numel() * part.element_size() for part in (run.cache.k, run.cache.v))
    weights = sum(file.stat().st_size for file in Path(args.model).glob("*.safetensors"))
    facts = {
        "tokens": len(prompt.token_ids),
        "dtype": engine.info.dtype,
        "cached_tokens": run.cached_tokens,
        "weights": weights,
        "kv": kv,
        "loaded": loaded,
        "peak": peak.bytes - before,
        "share": (peak.bytes - before) / (weights + kv),
    }
    if args.json:
        print(json.dumps(facts))
        return
    print(f"{facts['tokens']} tokens, {facts['dtype']}, {torch.get_num_threads()} threads")
    print(f"weights {weights / 1e6:.0f} MB, KV cache {kv / 1e6:.0f} MB")
    print(f"above import torch: {loaded / 1e6:.0f} MB loaded, {facts['peak'] / 1e6:.0f} MB at most")
    print(f"at most / (weights + KV cache): {facts['share']:.2f}")


if __name__ == "__main__":
    main()
