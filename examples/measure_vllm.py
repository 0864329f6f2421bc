"""vLLM's time to first token with blended KV beside its own full prefill, in one run.

    python examples/measure_vllm.py .cache/models/smollm2-135m
    python examples/measure_vllm.py MODEL --tokens 8192 --ratio 0.16 --ratio 0 --pairs 9 --json
    python examples/measure_vllm.py MODEL --throughput 32

The Python that runs it must have vLLM and this project. vLLM runs as it does by default; --eager,
--threads and the environment (VLLM_CPU_KVCACHE_SPACE) say otherwise. A prompt is a prefix of 32
tokens, 8 equal chunks of the documents in examples/docs and a question of 24 tokens. Every turn
takes another order of the chunks, a full prefill first, then a blend at every ratio; vLLM's prefix
cache is emptied before each. The chunks have been stored before, and every kind has run once.

KL: of the first output token's distribution from full prefill's, with all log-probabilities, and
untimed. --throughput: so many requests, each with 8 chunks of 16 in an order of its own, are queued
at once, with vLLM's prefix caching, first plain, then blended at the first ratio.
"""

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

DOCS = Path(__file__).parent / "docs"
PREFIX, QUESTION, CHUNKS, POOL = 32, 24, 8, 16
DEFAULT_RATIOS = ("0.16", "0.05", "0")
PATIENCE = 120.0  # seconds for chunks to be stored


@dataclass(frozen=True)
class World:
    """Token ids, cut from documents."""

    prefix: list[int]
    chunks: list[list[int]]
    question: list[int]

    def prompt(self, order: Sequence[int]) -> tuple[list[int], list[dict[str, Any]]]:
        """The prompt's ids, and its segments as a request names them."""
        ids, segments = list(self.prefix), [{"kind": "prefix", "tokens": PREFIX}]
        for index in order:
            ids += self.chunks[index]
            segments.append({"kind": "chunk", "tokens": len(self.chunks[index])})
        return ids + self.question, segments


class Measure:
    def __init__(self, given: argparse.Namespace, store: str) -> None:
        from vllm import LLM

        extra: dict[str, Any] = {"enforce_eager": True} if given.eager else {}
        self.llm: Any = LLM(
            model=given.model,
            max_model_len=given.tokens + given.output_tokens + 8,
            max_logprobs=-1,
            worker_cls="engine.vllm.host.CacheBlendWorker",
            kv_transfer_config={
                "kv_connector": "CacheBlendConnector",
                "kv_connector_module_path": "engine.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"store": store},
            },
            **extra,
        )
        self.given, self.chance = given, random.Random(given.seed)
        self.world = self._world()

    def _world(self) -> World:
        encode, ids = self.llm.get_tokenizer().encode, []
        for path in sorted(DOCS.rglob("*.md")):
            ids += encode(path.read_text("utf-8"), add_special_tokens=False)
        size = (self.given.tokens - PREFIX - QUESTION) // CHUNKS
        needed = PREFIX + QUESTION + POOL * size
        ids = ids * math.ceil(needed / len(ids))
        start = PREFIX + QUESTION
        pool = POOL if self.given.throughput else CHUNKS
        chunks = [ids[start + i * size : start + (i + 1) * size] for i in range(pool)]
        return World(ids[:PREFIX], chunks, ids[PREFIX:start])

    def order(self) -> list[int]:
        return self.chance.sample(range(len(self.world.chunks)), CHUNKS)

    def request(
        self, order: Sequence[int], ratio: str | None, **sampling: Any
    ) -> tuple[dict[str, Any], Any]:
        """What `generate` takes; ratio None: a plain request."""
        from vllm import SamplingParams

        ids, segments = self.world.prompt(order)
        own = {"cacheblend": {"segments": segments, "ratio": ratio, "save": True}}
        extra = None if ratio is None else {"kv_transfer_params": own}
        return (
            {"prompt_token_ids": ids},
            SamplingParams(temperature=0, ignore_eos=True, extra_args=extra, **sampling),
        )

    def timed(
        self, requests: Sequence[tuple[Any, Any]], *, keep: bool = False
    ) -> tuple[float, Any]:
        """Seconds until all are answered, from an empty prefix cache on; the answers."""
        if not keep:
            self.llm.reset_prefix_cache()
        prompts, params = zip(*requests, strict=True)
        began = time.perf_counter()
        outputs = self.llm.generate(list(prompts), list(params), use_tqdm=False)
        return time.perf_counter() - began, outputs

    def first(self, order: Sequence[int], ratio: str | None) -> float:
        """Seconds to the first token."""
        seconds, (output,) = self.timed([self.request(order, ratio, max_tokens=1)])
        done = _done(output)
        if ratio is not None and (done.get("status") != "blended" or done["chunk_tokens"]["miss"]):
            sys.exit(f"a request was not blended: {done or 'nothing is known of it'}")
        return seconds

    def store_chunks(self) -> None:
        """Until all are stored, behind the prefix they are used behind."""
        for start in range(0, len(self.world.chunks), CHUNKS):
            order = list(range(start, start + CHUNKS))
            until = time.monotonic() + PATIENCE
            while True:
                _, (output,) = self.timed([self.request(order, "0", max_tokens=1)])
                done = _done(output)
                if done.get("status") == "blended" and not done["chunk_tokens"]["miss"]:
                    break
                if time.monotonic() > until:
                    sys.exit(f"the chunks were not stored: {done}")
                time.sleep(0.2)

    def pairs(self) -> dict[str, list[float]]:
        kinds: list[str | None] = [None, *self.given.ratio]
        for kind in kinds:
            self.first(self.order(), kind)
        times: dict[str, list[float]] = {_name(kind): [] for kind in kinds}
        for _ in range(self.given.pairs):
            order = self.order()
            for kind in kinds:
                times[_name(kind)].append(self.first(order, kind))
        return times

    def kl(self, prompts: int = 3) -> dict[str, float]:
        """Mean over some prompts, in nats."""
        found: dict[str, list[float]] = {ratio: [] for ratio in self.given.ratio}
        for _ in range(prompts):
            order = self.order()
            full = self._logprobs(order, None)
            for ratio in self.given.ratio:
                other = self._logprobs(order, ratio)
                found[ratio].append(sum(math.exp(p) * (p - other[i]) for i, p in full.items()))
        return {ratio: sum(values) / len(values) for ratio, values in found.items()}

    def _logprobs(self, order: Sequence[int], ratio: str | None) -> dict[int, float]:
        _, (output,) = self.timed([self.request(order, ratio, max_tokens=1, logprobs=-1)])
        return {token: found.logprob for token, found in output.outputs[0].logprobs[0].items()}

    def throughput(self) -> dict[str, float]:
        """Seconds for all requests, plain and blended."""
        orders = [self.order() for _ in range(self.given.throughput)]
        seconds: dict[str, float] = {}
        for kind in (None, self.given.ratio[0]):
            requests = [
                self.request(order, kind, max_tokens=self.given.output_tokens) for order in orders
            ]
            seconds[_name(kind)], _ = self.timed(requests)
        return seconds


def _done(output: Any) -> dict[str, Any]:
    """What the connector says it did for a request."""
    return dict((output.kv_transfer_params or {}).get("cacheblend") or {})


def _name(ratio: str | None) -> str:
    return "full" if ratio is None else ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ratio", action="append", help=f"default: {' '.join(DEFAULT_RATIOS)}")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--throughput", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, help="of OpenMP; default: what vLLM takes")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-kl", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.ratio = given.ratio or list(DEFAULT_RATIOS)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if given.threads:
        os.environ["OMP_NUM_THREADS"] = str(given.threads)
    with tempfile.TemporaryDirectory(prefix="cacheblend-vllm-") as store:
        measure = Measure(given, store)
        measure.store_chunks()
        times = measure.pairs()
        kl = {} if given.no_kl else measure.kl()
        queued = measure.throughput() if given.throughput else {}
    full = times["full"]
    report = {
        "tokens": len(measure.world.prompt(range(CHUNKS))[0]),
        "pairs": given.pairs,
        "kinds": {
            name: {
                "ttft_s": median(found),
                "speedup": median(a / b for a, b in zip(full, found, strict=True)),
                "kl": kl.get(name),
                "all_s": found,
            }
            for name, found in times.items()
        },
        "throughput": {
            name: {
                "requests": given.throughput,
                "seconds": seconds,
                "requests_per_s": given.throughput / seconds,
                "speedup": queued["full"] / seconds,
            }
            for name, seconds in queued.items()
        },
    }
    print(json.dumps(report) if given.json else _table(report))


def _table(report: dict[str, Any]) -> str:
    lines = [f"{report['tokens']:,} tokens, medians of {report['pairs']}"]
    for name, found in report["kinds"].items():
        label = (
            "full prefill" if name == "full" else "reuse" if not float(name) else f"blend {name}"
        )
        kl = "" if found["kl"] is None else f"   KL {found['kl']:.4f}"
        lines.append(
            f"{label:13}{found['ttft_s'] * 1000:7.0f} ms   {found['speedup']:5.1f} times{kl}"
        )
    for name, found in report["throughput"].items():
        label = "plain" if name == "full" else f"blend {name}"
        lines.append(
            f"{found['requests']} queued, {label:11}{found['seconds']:6.1f} s"
            f"   {found['requests_per_s']:5.2f} a second   {found['speedup']:5.1f} times"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
