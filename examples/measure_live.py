"""What watching a run costs: time to first token with `ask --live`'s view on a pseudo terminal,
with nothing but the observer told, and without, in turns.

    python examples/measure_live.py .cache/models/smollm2-135m --tokens 2304 --pairs 12
"""

import argparse
import os
import pty
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from measure_trace import stored_prompt

from cache_store.store import ChunkStore
from cbcli.inspect.theme import Look
from cbcli.live.ask import AskScene
from cbcli.live.region import Region
from engine import BlendOptions, Engine

WAYS = ("without", "told", "shown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=2304)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--policies", default="question,value")
    wanted = parser.parse_args()
    master, slave = pty.openpty()
    with (
        tempfile.TemporaryDirectory() as folder,
        ChunkStore.open(Path(folder) / "store", limit_bytes=10 * 10**9) as store,
        os.fdopen(slave, "w", encoding="utf-8") as screen,
        subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL) as reader,
    ):
        engine = Engine.load(wanted.model, store=store)
        prompt = stored_prompt(engine, wanted.tokens)
        for policy in wanted.policies.split(","):
            options = BlendOptions.of(policy=policy, min_tokens=0)
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(wanted.pairs + 1):
                for way in WAYS if number % 2 else WAYS[::-1]:
                    with ExitStack() as stack:
                        scene = None
                        if way != "without":
                            scene = AskScene()
                            scene.about(engine.model.config.layers, options)
                        if way == "shown" and scene is not None:
                            stack.enter_context(Region(scene, screen, Look()))
                        began = time.perf_counter()
                        engine.prefill(prompt, options, room=4, observer=scene)
                        if number:  # the first round only warms up
                            seconds[way].append(time.perf_counter() - began)
            print(f"{policy}, {len(prompt.token_ids)} tokens, {wanted.pairs} rounds: ", end="")
            print(", ".join(_compared(seconds, way) for way in WAYS))
        reader.terminate()
    os.close(master)


def _compared(seconds: dict[str, list[float]], way: str) -> str:
    """The median and the least, and the median of what the rounds differ by from those without."""
    both = zip(seconds[way], seconds["without"], strict=True)
    more = statistics.median(a / b - 1 for a, b in both)
    median, least = statistics.median(seconds[way]), min(seconds[way])
    return f"{way} {1e3 * median:.1f} ms ({more:+.2%}), least {1e3 * least:.1f}"


if __name__ == "__main__":
    main()
