"""From the start of `cacheblend ask` to its first token, beside what must be: torch and TTFT.

    CACHEBLEND_MODELS_DIR=.cache/models python examples/measure_start.py [--runs 5]

The example documents are ingested into a temporary store. Every run starts four processes in turn:
one that only imports torch, `ask`, timed to its first byte of the answer, `ask --json`, which tells
its TTFT, and `--help`. Figures are medians; files are in the page cache after a run that isn't
counted.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "from cbcli.main import main; main()"]
QUESTION = "In which year was Fennimar Buoy Works founded?"


def to_first_byte(command: list[str]) -> float:
    """Seconds until the command prints something, or ends."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.read(1)
        taken = time.perf_counter() - began
        process.stdout.read()
    if process.returncode:
        raise SystemExit(f"failed: {' '.join(command)}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = ["--store", folder]
        documents = str(Path(__file__).parent / "docs")
        subprocess.run([*COMMAND, "ingest", *store, documents, "-q"], check=True)
        ask = [*COMMAND, "ask", *store, "-n", "2", QUESTION]
        for turn in range(runs + 1):
            torch = to_first_byte([sys.executable, "-c", "import torch"])
            first = to_first_byte(ask)
            told = subprocess.run([*ask, "--json"], capture_output=True, check=True).stdout
            ttft = json.loads(told)["timing"]["ttft_s"]
            row = {
                "cacheblend --help": to_first_byte([*COMMAND, "--help"]),
                "import torch": torch,
                "ttft": ttft,
                "ask, first token": first,
                "more than both": first - torch - ttft,
            }
            for name, seconds in row.items():
                if turn:
                    times.setdefault(name, []).append(seconds)
    for name, values in times.items():
        spread = f"{min(values):.2f}-{max(values):.2f}"
        print(f"{name:18}{statistics.median(values):6.2f} s  ({spread})")


if __name__ == "__main__":
    main()
