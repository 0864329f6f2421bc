"""How soon `cacheblend inspect` shows a saved trace, and how soon it answers a key.

    python examples/measure_inspect.py [--tokens 32000] [--runs 5] [TRACE]

Without a trace, one of so many tokens is made up. Started is a process of its own, until its first
screen is drawn; what it takes to start Python alone is beside it. Keys are pressed in this process,
each until the screen is drawn anew. Computing is CPU time, to which other programs add little.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from cbcli.inspect.app import InspectApp
from engine.trace import LayerSpan, Stage, TokenTable, Trace, read, write

SIZE = (120, 40)
KEYS = {
    "next token": ("1", "right"),
    "next line": ("1", "down"),
    "next page": ("1", "pagedown"),
    "next recomputed": ("1", "n"),
    "next chunk": ("1", "right_square_bracket"),
    "another colour scale": ("1", "l"),
    "layers: tokens before": ("2", "left"),
    "time: next layer": ("3", "down"),
}
FIRST_SCREEN = """
import asyncio, gc, sys
gc.disable()  # as the command does
from pathlib import Path
from cbcli.commands.inspect import load_traces
from cbcli.inspect.app import InspectApp
async def show():
    app = InspectApp(load_traces([Path(sys.argv[1])], None))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        app.export_screenshot()
asyncio.run(show())
assert "torch" not in sys.modules
"""


def made_up(tokens: int, layers: int = 30) -> Trace:
    """A run over eight chunks with the value policy."""
    random = np.random.default_rng(0)
    words = [b" the", b" tide", b" turns", b",", b" and", b" Orla", b" signs", b".", b"\n"]
    chosen = [words[int(at)] for at in random.integers(0, len(words), tokens)]
    bounds = np.linspace(32, tokens - 24, 9).astype(int).tolist()
    parts = [("prefix", 0, 32, "exact")]
    parts += [("chunk", a, b, "hit") for a, b in pairwise(bounds)]
    parts.append(("suffix", bounds[-1], tokens, "computed"))
    positions = np.arange(bounds[0], bounds[-1], dtype=np.int32)
    stage = Stage(1, positions, random.pareto(1.5, len(positions)).astype(np.float32), tokens // 6)
    computed = np.full(tokens, layers, np.int16)
    computed[positions] = 2
    computed[stage.selected()] = layers
    ids = random.integers(0, 49152, tokens).astype(np.int32)
    times = {"retrieve_s", "ttft_s", "kv_load_s", "kv_stall_s", "rotate_s", "score_s"}
    times |= {"load_model_s", "tokenize_s", "recompute_s", "decode_s", "total_s"}
    result = {
        "schema": 1,
        "answer": "Orla.",
        "finish_reason": "stop",
        "output_token_ids": [1],
        "model": {"name": "made up", "fingerprint": "", "dtype": "bf16", "device": "cpu"},
        "mode": "blend",
        "policy": "value",
        "ratios": [0.16],
        "threshold": None,
        "transfer": False,
        "check_layers": [1],
        "skipped_blend": None,
        "prompt": {
            "token_ids": ids.tolist(),
            "segments": [
                {"kind": k, "chunk_id": None, "source": None, "start": a, "end": b, "status": s}
                for k, a, b, s in parts
            ],
        },
        "recomputed": {"tokens": stage.chosen, "fraction": 0.16, "per_layer": [1] * layers},
        "first_token": {"id": 1, "top_logprobs": []},
        "timing": {**dict.fromkeys(times, 0.1), "layers": []},
        "kv": {"bytes_loaded": 0, "tier": "none", "tiers": {}},
        "compare": None,
        "audit": None,
    }
    ends = np.cumsum([len(word) for word in chosen]).astype(np.int32)
    spans = [LayerSpan(n * 0.01, n * 0.002, 0.002, 0, 0.001, 0, 0.009) for n in range(layers)]
    table = TokenTable(ids, b"".join(chosen), ends, computed)
    question = "Who signs?"
    return Trace(
        "made-up", 0.0, "basic", question, result, layers, table, (stage,), tuple(spans), (), ()
    )


def started(command: list[str], runs: int) -> tuple[float, float]:
    """Median seconds of a process, and of its computing."""
    found, worked = [], []
    for _ in range(runs + 1):  # the first reads the files
        began, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True)
        after = os.times()
        found.append(time.perf_counter() - began)
        worked.append(sum(after[2:4]) - sum(before[2:4]))
    return statistics.median(found[1:]), statistics.median(worked[1:])


async def pressed(trace: Trace, presses: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every press, until the screen is drawn, and of computing."""
    found: dict[str, list[tuple[float, float]]] = {}
    app = InspectApp([trace])
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause()
        for name, (view, key) in KEYS.items():
            await pilot.press(view)
            await pilot.pause()
            found[name] = []
            for _ in range(presses):
                began, before = time.perf_counter(), time.process_time()
                app.simulate_key(key)
                await drawn(app)
                taken = time.perf_counter() - began
                found[name].append((taken, time.process_time() - before))
    return found


async def drawn(app: InspectApp) -> None:
    """Waits until everything that a key set off was done and the screen drawn: the key's way goes
    over the screen to a widget, and from there to others."""
    for _ in range(3):
        done = asyncio.Event()
        app.call_later(app.call_after_refresh, done.set)
        await done.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--presses", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = given.trace or Path(folder) / "made-up.cbtrace"
        if given.trace is None:
            write(made_up(given.tokens), path)
        bare = started([sys.executable, "-c", "pass"], given.runs)
        first = started([sys.executable, "-c", FIRST_SCREEN, str(path)], given.runs)
        trace = read(path)
        print(f"{len(trace.tokens.ids):,} tokens, {path.stat().st_size:,} bytes")
        print(f"{'':22}  median    most    computing")
        for name, (wall, work) in (("Python alone", bare), ("start to first screen", first)):
            print(f"{name:22} {wall * 1000:5.0f} ms           {work * 1000:6.0f} ms")
        for name, times in asyncio.run(pressed(trace, given.presses)).items():
            walls, works = zip(*times, strict=True)
            middle, most = statistics.median(walls) * 1000, max(walls) * 1000
            work = statistics.median(works) * 1000
            print(f"{name:22} {middle:5.1f} ms {most:5.1f} ms  {work:5.1f} ms")


if __name__ == "__main__":
    main()
