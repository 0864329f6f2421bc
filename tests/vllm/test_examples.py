"""The example for vLLM, as it is run from a shell."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.engine.tiny_tokenizers import SENTENCES

ROOT = Path(__file__).parent.parent.parent


def test_chunks_in_any_order(tiny_dir: Callable[[str], Path], tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.txt" for name in ("one", "two", "three")]
    for number, path in enumerate(files):
        path.write_text(f"Text {number}. " + " ".join(SENTENCES[:3]))
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "examples" / "vllm_any_order.py")),
            *(str(tiny_dir("llama")), *map(str, files)),
            *("--dtype=float32", "--min-tokens=0", "--max-model-len=1024", "--max-tokens=2"),
            *("--store", str(tmp_path), "--ratio=0.5", "--limit=200000000"),
        ],
        capture_output=True,
        text=True,
        # As it is without our tests: the engine has a process of its own.
        env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("prompt ")  # what vLLM says is elsewhere
    rows = [line.split() for line in lines[1:5]]
    assert [row[0] for row in rows] == ["warm-up", "first", "second", "third"]
    assert [row[1:4] for row in rows] == [[*"012"], [*"012"], [*"210"], [*"120"]]
    cached, missed, recomputed = ([int(row[n]) for row in rows] for n in (4, 5, 6))
    assert missed[0] > 100
    assert cached == [0, *missed[:1] * 3]
    assert missed[1:] == [0, 0, 0]
    assert recomputed[1:] == [-(-cached[1] // 2)] * 3
