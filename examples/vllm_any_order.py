"""The same chunks in several orders, in vLLM's own Python API.

    python examples/vllm_any_order.py MODEL [TEXT_FILE…] [--store DIR] [--ratio 0.16]

MODEL: a model's folder (`cacheblend models show smollm2-135m` names it). Each text file is a chunk;
without any, some of examples/docs. A prompt is instructions, chunks and a question in one text,
with " # # " between them. The first one finds nothing stored; its chunks are stored after the
answer, and every later prompt finds them, in whatever order. Every prompt is also computed whole
("full"), and before each one vLLM's own prefix cache is emptied. Needs vLLM, and runs on what that
runs on, without a GPU too.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the table alone is on stdout
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams

from cache_store.store import ChunkStore

DOCS = Path(__file__).parent / "docs"
SEPARATOR = " # # "
INSTRUCTIONS = "Answer the question from the texts below. Be brief."
QUESTIONS = {
    "warm-up": "What is written here?",
    "first": "What does the company make?",
    "second": "Who may sign for a purchase?",
    "third": "What does the company make?",
}


def main() -> None:
    given = arguments()
    texts = [path.read_text("utf-8")[: given.characters].strip() for path in given.texts]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(given.store or folder) / "store"
        ChunkStore.open(store, limit_bytes=given.limit).close()
        llm = start(given, store)
        print(
            f"{'prompt':9}{'order':10}{'cached':>8}{'missed':>8}{'recomputed':>12}"
            f"{'full':>10}{'blend':>10}{'speedup':>9}  answer"
        )
        chunks = range(len(texts))
        orders = [[*chunks], [*chunks], [*reversed(chunks)], [*chunks[1:], 0]]
        ask(llm, "Hello.", {"mode": "full"}, 1)  # the kernels are warm from here on
        for (name, question), order in zip(QUESTIONS.items(), orders, strict=True):
            parts = [INSTRUCTIONS, *(texts[index] for index in order), question]
            prompt = SEPARATOR.join(parts)
            _, full_s = ask(llm, prompt, {"mode": "full"}, 1)
            entries = count(store)
            output, blend_s = ask(llm, prompt, {"ratio": given.ratio}, 1)
            told = output.kv_transfer_params["cacheblend"]
            wait_for(store, entries + told["saving"])
            answer, _ = ask(llm, prompt, {"ratio": given.ratio}, given.max_tokens)
            tokens = told["chunk_tokens"]
            print(
                f"{name:9}{' '.join(map(str, order)):10}{tokens['cached']:8}{tokens['miss']:8}"
                f"{told['recomputed']['tokens']:12}{full_s * 1000:7.0f} ms{blend_s * 1000:7.0f} ms"
                f"{full_s / blend_s:8.1f}x  {' '.join(answer.outputs[0].text.split())[:60]}"
            )


def start(given: argparse.Namespace, store: Path) -> LLM:
    """vLLM, unchanged, with the connector and the worker set."""
    return LLM(
        model=given.model,
        dtype=given.dtype,
        max_model_len=given.max_model_len,
        tensor_parallel_size=given.tensor_parallel_size,
        enforce_eager=True,
        worker_cls="engine.vllm.host.CacheBlendWorker",
        kv_transfer_config={
            "kv_connector": "CacheBlendConnector",
            "kv_connector_module_path": "engine.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "store": str(store),
                "separator": SEPARATOR,
                "min_tokens": given.min_tokens,
            },
        },
    )


def ask(llm: LLM, prompt: str, wishes: dict[str, Any], tokens: int) -> tuple[Any, float]:
    """One answer, and the seconds it took; with one token, that is the time to first token."""
    llm.reset_prefix_cache()
    sampling = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        extra_args={"kv_transfer_params": {"cacheblend": wishes}},
    )
    began = time.perf_counter()
    if llm.get_tokenizer().chat_template:
        messages: Any = [{"role": "user", "content": prompt}]
        (output,) = llm.chat(messages, sampling, use_tqdm=False)
    else:
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    return output, time.perf_counter() - began


def count(store: Path) -> int:
    with ChunkStore.open(store, read_only=True) as opened:
        return sum(1 for _ in opened.entries())


def wait_for(store: Path, entries: int, seconds: float = 120) -> None:
    """Missed chunks are stored while vLLM has nothing else to do."""
    end = time.monotonic() + seconds
    while count(store) < entries and time.monotonic() < end:
        time.sleep(0.05)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("texts", nargs="*", type=Path, help="text files, each a chunk")
    parser.add_argument("--store", help="folder that a store is kept in; else it is thrown away")
    parser.add_argument("--limit", type=int, default=2 * 10**9, help="bytes of a new store")
    parser.add_argument("--ratio", default="0.16", help="share of the cached tokens to recompute")
    parser.add_argument("--characters", type=int, default=3000, help="most characters of a text")
    parser.add_argument("--min-tokens", type=int, default=256, help="below it nothing is blended")
    parser.add_argument("--max-tokens", type=int, default=24, help="length of an answer")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    given = parser.parse_args()
    given.texts = given.texts or sorted(DOCS.glob("*.md"))[:4]
    return given


if __name__ == "__main__":
    main()
