"""One question over the example documents, the same chunks in two orders, answered three ways.

    cacheblend ingest examples/docs
    python examples/demo.py ["question"]

Uses the store and model that the settings name, as the command does.
"""

import sys

from cbcli.output import Output
from cbcli.session import open_blueprint, open_store
from cbcli.settings import load_settings
from engine import AskResult, BlendOptions, Engine, PromptChunk, SamplingOptions
from engine.retrieval import BM25Retriever

QUESTION = "In which year was the company founded?"
WAYS = {
    "full prefill": BlendOptions.of(mode="full"),
    "blend 0.16": BlendOptions.of(ratio="0.16"),
    "reuse": BlendOptions.of(mode="reuse"),
}
SHOWN = 10  # recomputed tokens shown per chunk


def main(question: str) -> None:
    out = Output()
    settings = load_settings()
    with open_store(settings) as store:
        hits = BM25Retriever(store.catalog.chunks()).search(question, settings.top_k)
        if not hits:
            sys.exit("no stored chunk fits the question: cacheblend ingest examples/docs")
        engine = Engine.load(open_blueprint(settings, out), store=store)
        chunks = [engine.chunk(hit.chunk.text, hit.chunk.source) for hit in hits]
        out.line(f"Question: {question}")
        for name, ordered in (("best first", chunks), ("best last", chunks[::-1])):
            out.line()
            out.line(f"Order: {name}", style="bold")
            show_order(out, engine, question, ordered)


def show_order(out: Output, engine: Engine, question: str, chunks: list[PromptChunk]) -> None:
    sampling = SamplingOptions(max_tokens=32)
    results = {}
    for way, options in WAYS.items():
        prompt = engine.prompt(question, chunks)
        engine.prefill(prompt, options)  # once unmeasured, so that each way runs warm
        results[way] = engine.ask(question, chunks, blend=options, sampling=sampling)
    full = results["full prefill"].timing.ttft_s
    rows = [
        (
            way,
            f"{1000 * result.timing.ttft_s:.0f} ms",
            f"{full / result.timing.ttft_s:.1f}x",
            len(result.prompt.token_ids) if way == "full prefill" else result.recomputed.tokens,
            " ".join(result.answer.split()),
        )
        for way, result in results.items()
    ]
    headers = ["way", "first token", "speedup", "recomputed", "answer"]
    out.table(headers, rows, right=["first token", "speedup", "recomputed"])
    out.line("What the blend recomputed:")
    for line in recomputed_tokens(engine, results["blend 0.16"]):
        out.line(f"  {line}")


def recomputed_tokens(engine: Engine, result: AskResult) -> list[str]:
    """Per chunk, how many tokens were recomputed and the first of them as text."""
    lines = []
    for segment in result.prompt.segments:
        if segment.kind != "chunk":
            continue
        name = (segment.source or "?").rsplit("/", 1)[-1]
        if segment.status == "exact":
            lines.append(f"{name}: none, it stands where it was computed")
            continue
        inside = [p for p in result.selected if segment.start <= p < segment.end]
        words = [engine.tokenizer.decode([result.prompt.token_ids[p]]) for p in inside[:SHOWN]]
        shown = " ".join(repr(word) for word in words)
        lines.append(f"{name}: {len(inside)} of {segment.end - segment.start}: {shown} …")
    return lines


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or QUESTION)
