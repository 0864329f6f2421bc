"""The time to first token with stored KV from the disk, from memory and from a remote store.

    python examples/measure_tiers.py .cache/models/smollm2-135m redis://127.0.0.1:6379

One process, turn by turn, over the documents in examples/docs; the remote gets their chunks.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from cache_store.tiers.addresses import connect, read_address
from cache_store.tiers.remote import RemoteTier
from cache_store.tiers.tiered import TieredStore, open_tiered
from engine import AskResult, BlendOptions, Engine, PromptChunk, SamplingOptions

DOCS = Path(__file__).parent / "docs"
QUESTION = "In which year was the company founded?"
CHUNK_CHARACTERS = 1800
PATIENCE = 5.0  # seconds for an answer of the remote
LIMIT = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("remote", help="an address, as the setting `remote` takes it")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    address = read_address(given.remote)

    def tier() -> RemoteTier:
        return RemoteTier(lambda seconds: connect(address, seconds), PATIENCE)

    text = "\n\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))
    pieces = [text[at : at + CHUNK_CHARACTERS] for at in range(0, len(text), CHUNK_CHARACTERS)]
    with tempfile.TemporaryDirectory(prefix="cacheblend-tiers-") as folder:
        root = Path(folder)
        with open_tiered(root / "full", remote=tier, limit_bytes=LIMIT) as full:
            engine = Engine.load(given.model, store=full)
            chunks = [engine.chunk(piece) for piece in pieces[: given.chunks]]
            engine.precompute(chunks)
            full.push()
        open_tiered(root / "empty", limit_bytes=LIMIT).close()  # the remote's reader has nothing
        with (
            open_tiered(root / "full") as disk,
            open_tiered(root / "full", memory_limit=LIMIT) as memory,
        ):
            memory.warm([entry.key for entry in memory.entries()])
            runs: dict[str, list[AskResult]] = {"full prefill": [], "disk": [], "memory": []}
            runs["remote"] = []
            for _ in range(given.rounds + 1):
                runs["full prefill"].append(_ask(engine, disk, chunks, "full"))
                runs["disk"].append(_ask(engine, disk, chunks))
                runs["memory"].append(_ask(engine, memory, chunks))
                # Open for reading only, it keeps nothing of what it reads.
                with open_tiered(root / "empty", remote=tier, read_only=True) as remote:
                    runs["remote"].append(_ask(engine, remote, chunks))
    print(f"{sum(len(chunk.token_ids) for chunk in chunks):,} tokens, medians of {given.rounds}")
    for name, results in runs.items():
        times = [result.timing for result in results[1:]]  # the first warms up
        first, load, stall = (
            1000 * median(getattr(time, part) for time in times)
            for part in ("ttft_s", "kv_load_s", "kv_stall_s")
        )
        tiers = {result.kv.tier for result in results[1:]}
        print(
            f"{name:14}{first:7.0f} ms   reading {load:6.1f} ms   waiting {stall:6.1f} ms"
            f"   {', '.join(sorted(tiers))}"
        )


def _ask(
    engine: Engine, store: TieredStore, chunks: list[PromptChunk], mode: str = "blend"
) -> AskResult:
    engine.store = engine.prefiller.store = store
    return engine.ask(
        QUESTION,
        chunks[::-1],
        blend=BlendOptions.of(mode=mode),
        sampling=SamplingOptions(max_tokens=1),
        save=False,
    )


if __name__ == "__main__":
    main()
