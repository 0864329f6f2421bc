"""docs/vllm.md says what the code does."""

import json
import re
from pathlib import Path

from engine.vllm.checks import DECLARED
from engine.vllm.metrics import COUNTERS, HISTOGRAMS
from engine.vllm.naming import WISHES, from_segments, listed
from engine.vllm.settings import settings_table

ROOT = Path(__file__).parent.parent.parent.parent
PAGE = (ROOT / "docs" / "vllm.md").read_text("utf-8")
LMCACHE = (
    *("ENABLE_BLENDING", "BLEND_SPECIAL_STR", "BLEND_CHECK_LAYERS", "BLEND_RECOMPUTE_RATIOS"),
    *("BLEND_THRESHOLDS", "BLEND_MIN_TOKENS", "USE_LAYERWISE", "EXTRA_CONFIG", "CHUNK_SIZE"),
    *("LOCAL_CPU", "MAX_LOCAL_CPU_SIZE", "LOCAL_DISK", "MAX_LOCAL_DISK_SIZE"),
)


def between(name: str) -> str:
    return PAGE.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def test_the_table_of_settings_is_the_codes() -> None:
    assert between("settings") == settings_table()


def test_every_wish_metric_and_version_is_named() -> None:
    assert [name for name in WISHES if f"`{name}`" not in PAGE] == []
    metrics = [m.name for m in (*COUNTERS, *HISTOGRAMS)]
    assert [name for name in metrics if name not in PAGE] == []
    assert DECLARED == ">=0.32,<0.33"
    assert "other than 0.32" in PAGE


def test_every_setting_of_lmcache_has_its_row() -> None:
    table = PAGE.partition("## Coming from LMCache")[2]
    assert [n for n in LMCACHE if f"`LMCACHE_{n}`" not in table] == []
    for flag in ("lmcache server", "--l1-size-gb", "--eviction-policy", "--engine-type blend"):
        assert f"`{flag}`" in table
    assert "`enable_sparse`" in table


def test_the_example_of_a_request_is_one() -> None:
    found = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    given = json.loads(found[1].replace('"…"', f'"{"0" * 64}"'))
    segments = given["kv_transfer_params"]["cacheblend"]["segments"]
    assert listed(from_segments(range(1000), segments)) == segments
