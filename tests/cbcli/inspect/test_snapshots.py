"""What the views look like, at three sizes, dark, light and without colour. After a change that is
meant: pytest tests/cbcli/inspect/test_snapshots.py --snapshot-update, and look at the pictures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cbcli.inspect.app import InspectApp
from tests.cbcli.inspect.support import example

LOOKS = {"dark": (80, 24), "light": (120, 40), "none": (200, 60)}
CASES = [
    (view, look, LOOKS[look]) for view in ("tokens", "layers", "time", "compare") for look in LOOKS
]
CASES += [("tokens", "none", (80, 24)), ("layers", "none", (80, 24))]


NAMES = [f"{view}-{look}-{size[0]}" for view, look, size in CASES]


@pytest.mark.parametrize(("view", "look", "size"), CASES, ids=NAMES)
def test_a_view_looks_as_it_did(
    view: str,
    look: str,
    size: tuple[int, int],
    snap_compare: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if look == "none":
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    traces = [example(), example(seed=1, ratio=0.3, name="20260101-130000-value")]
    app = InspectApp(traces, view=view, dark=look != "light")
    assert snap_compare(app, terminal_size=size)
