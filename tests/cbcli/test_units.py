"""Numbers for people, and sizes read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbcli.units import count_text, duration_text, rate_text, size_text
from engine.kinds import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GB", 20_000_000_000),
        ("20 gb", 20_000_000_000),
        ("500MiB", 500 * 2**20),
        ("1.5k", 1500),
        ("0.5GiB", 2**29),
        ("1000", 1000),
        ("7B", 7),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1GB", "1e9", "12 parsecs", "1.5B", "1,5GB", "1i", "5\nGB", "99999999999999TB"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (23040, "23.0 kB"),
        (999_940, "1.0 MB"),
        (272_585_748, "273 MB"),
        (5_800_000_000, "5.8 GB"),
        (20 * 10**15, "20000 TB"),
    ],
)
def test_sizes_are_said(size: int, text: str) -> None:
    assert size_text(size) == text


@given(st.integers(0, 10**16))
def test_a_said_size_is_near_the_true_one(size: int) -> None:
    assert abs(parse_size(size_text(size)) - size) <= max(0.05 * size, 1)


def test_counts_rates_and_durations() -> None:
    assert count_text(12345, "tokens") == "12,345 tokens"
    assert count_text(1500, "bytes") == "1.5 kB"
    assert rate_text(310.4, "tokens") == "310 tokens/s"
    assert rate_text(4.25, "files") == "4.2 files/s"
    assert rate_text(12_300_000, "bytes") == "12.3 MB/s"
    said = [duration_text(s) for s in (0.34, 0.9999, 12.34, 59.99, 250, 7500)]
    assert said == ["340 ms", "1.0 s", "12.3 s", "1 min 0 s", "4 min 10 s", "2 h 5 min"]
