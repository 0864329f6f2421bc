"""Progress, pager and lists: the settings and flags that say how things are shown."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import UsageError
from cbcli.listing import Field, ListForm, Listing
from cbcli.output import Output
from cbcli.progress import Progress
from tests.cbcli.terminal import Terminal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def output(
    *,
    stdout: io.StringIO | None = None,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> tuple[Output, io.StringIO]:
    stdout = stdout or io.StringIO()
    return Output(stdout=stdout, stderr=io.StringIO(), env=env or {}, **more), stdout


@pytest.mark.parametrize(
    ("wanted", "as_json", "lines"),
    [("auto", False, 0), ("plain", False, 6), ("plain", True, 6), ("none", False, 0)],
)
def test_progress_off_a_terminal_is_lines_where_they_are_wanted(
    wanted: str, as_json: bool, lines: int
) -> None:
    clock, stderr = Clock(), io.StringIO()
    out = Output(
        json=as_json, stdout=io.StringIO(), stderr=stderr, env={}, options={"progress": wanted}
    )
    with out.progress("ingest", unit="tokens", total=10_000) as progress:
        progress._clock = clock
        progress._last_line = 0.0
        for second in range(61):
            clock.now = float(second)
            progress.update(second * 100)
    shown = stderr.getvalue().splitlines()
    assert len(shown) == lines
    if as_json:
        assert json.loads(shown[1])["progress"] == {
            "label": "ingest",
            "done": 2000,
            "total": 10_000,
            "unit": "tokens",
            "rate": 100.0,
            "left_s": 80.0,
        }


def test_no_time_is_foretold_before_a_rate_is_known() -> None:
    clock = Clock()
    progress = Progress(
        "loading", unit="tokens", total=1000, stream=io.StringIO(), bar=False, silent=True,
        clock=clock,
    )  # fmt: skip
    progress.update(0)
    clock.now = 14.0  # the model was loaded meanwhile
    progress.update(0, label="computing")
    clock.now = 16.0
    progress.update(100)
    assert progress.facts(100, 16.0) == "100 of 1,000 tokens (10%), 50 tokens/s"
    clock.now = 18.0
    progress.update(200)
    assert progress.facts(200, 18.0).endswith("50 tokens/s, 16.0 s left")


def long_text(tmp_path: Path, pager: str, **more: Any) -> tuple[str, str]:
    """What 100 lines come to on a terminal of 24: in the pager's file, and printed."""
    seen = tmp_path / "seen"
    out, stdout = output(
        stdout=Terminal(), env=os.environ | {"PAGER": pager.format(seen=seen)}, **more
    )
    out.table(["number", "text"], [[n, "\x1b[2J"] for n in range(100)])
    out.line("after")
    return seen.read_text("utf-8") if seen.exists() else "", stdout.getvalue()


def test_long_tables_on_a_terminal_go_to_the_pager(tmp_path: Path) -> None:
    seen, printed = long_text(tmp_path, "cat > {seen}")
    assert len(seen.splitlines()) == 101
    assert "␛[2J" in seen
    assert "\x1b[2J" not in seen
    assert printed == "after\n"


@pytest.mark.parametrize("pager", ["head -1 > {seen}", "exit 3", "kill $$"])
def test_a_pager_that_is_left_early_is_no_error(pager: str, tmp_path: Path) -> None:
    seen, printed = long_text(tmp_path, pager)
    assert len(seen.splitlines()) == (1 if "head" in pager else 0)
    assert printed == "after\n"


@pytest.mark.parametrize("pager", ["no-such-pager-at-all", "", "cat"])
def test_without_a_pager_all_is_printed(pager: str, tmp_path: Path) -> None:
    _, printed = long_text(tmp_path, pager)
    assert len(printed.splitlines()) == 102


def test_the_pager_can_be_switched_off_and_chosen(tmp_path: Path) -> None:
    for off in ({"options": {"pager": False}}, {"json": True}):
        seen, printed = long_text(tmp_path, "cat > {seen}", **off)
        assert (seen, len(printed.splitlines())) == ("", 102)
    chosen = tmp_path / "chosen"
    long_text(tmp_path, "cat > {seen}", options={"pager": f"cat > {chosen}"})
    assert len(chosen.read_text("utf-8").splitlines()) == 101


def test_a_projects_file_names_no_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evil = tmp_path / "evil"
    (tmp_path / "cacheblend.toml").write_text(f'pager = "cat > {evil}"')
    seen, _ = long_text(tmp_path, "cat > {seen}")
    assert len(seen.splitlines()) == 101
    assert not evil.exists()
    (tmp_path / "cacheblend.toml").write_text("pager = false")
    (tmp_path / "seen").unlink()
    assert long_text(tmp_path, "cat > {seen}")[0] == ""


def test_short_and_piped_text_needs_no_pager(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    env = os.environ | {"PAGER": f"cat > {seen}"}
    for stream, lines in ((Terminal(), 5), (io.StringIO(), 100)):
        out, stdout = output(stdout=stream, env=env)
        out.table(["number"], [[n] for n in range(lines)])
        assert len(stdout.getvalue().splitlines()) == lines + 1
    assert not seen.exists()


LIST = Listing(
    "things",
    "id",
    (
        Field("id", "thing", lambda name: name[:3]),
        Field("size", show=lambda size: f"{size} B", right=True),
        Field("place", column=False),
        Field("model", raw=False),
    ),
)
RECORDS = [
    {"id": "abcdef", "size": 5, "place": {"page": 1}, "kinds": ["m", "n"]},
    {"id": "ghijkl", "size": 12, "place": None, "kinds": ["m"]},
    {"id": "abcdef", "size": 5, "place": None, "kinds": []},
]


def listed(fields: str | None = None, *, jsonl: bool = False, **more: Any) -> str:
    out, stdout = output(form=ListForm(jsonl, fields), **more)

    def rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{**record, "model": kind} for kind in record["kinds"] or [None]]

    count = out.list(LIST, iter(RECORDS), rows=rows, around=lambda all: {"of": 1, "things": all})
    assert count == 3
    return stdout.getvalue()


def test_a_list_is_a_table_of_some_columns() -> None:
    assert listed().splitlines() == [
        "thing  size  model",
        "abc     5 B  m",
        "abc     5 B  n",
        "ghi    12 B  m",
        "abc     5 B",
    ]
    assert listed("place, thing").splitlines()[:2] == ["place        thing", '{"page": 1}  abc']


def test_a_list_as_json_has_raw_values_and_those_fields_that_are_chosen() -> None:
    whole = json.loads(listed(json=True))
    assert whole["of"] == 1
    assert whole["things"][0] == {"id": "abcdef", "size": 5, "place": {"page": 1}}
    assert json.loads(listed("size", json=True))["things"] == [{"size": n} for n in (5, 12, 5)]


def test_jsonl_is_a_record_a_line() -> None:
    lines = [json.loads(line) for line in listed(jsonl=True).splitlines()]
    assert [line["size"] for line in lines] == [5, 12, 5]
    lines = [json.loads(line) for line in listed("model,id", jsonl=True).splitlines()]
    assert [list(line) for line in lines] == [["model", "id"]] * 4
    assert [line["model"] for line in lines] == ["m", "n", "m", None]


def test_quiet_prints_whole_ids_each_once() -> None:
    assert listed(quiet=True) == "abcdef\nghijkl\n"


@pytest.mark.parametrize("more", [{}, {"json": True}, {"jsonl": True}])
def test_an_unknown_field_is_named_with_the_nearest(more: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match="no field 'sise'") as raised:
        listed("id,sise", **more)
    assert raised.value.hint.startswith("did you mean size? there are id, size, place, model")
    with pytest.raises(UsageError, match="no field ''"):
        listed("id,,size", **more)
