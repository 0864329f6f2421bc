"""`--audit` of `ask` and `run`, and what `store stats` tells of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cbcli.world import World, make_world

pytestmark = pytest.mark.timeout(180)

QUESTION = "Who keeps the log of every boat?"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = make_world(tmp_path, monkeypatch)
    world.json("ingest", "docs", "--chunk-tokens", "24")
    return world


def log_of(world: World) -> Path:
    return world.root / "home" / "store" / "audit" / "log.jsonl"


def audited(world: World, *args: str) -> Any:
    return world.json("ask", QUESTION, "--ratio", "0.3", *args)["audit"]


def audit_stats(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.json("store", "stats")["audit"]
    return found


def test_nothing_is_audited_unasked(world: World) -> None:
    assert audited(world) is None
    assert not log_of(world).exists()
    none = {"audited": 0, "damaged_lines": 0, "mean_of_last": 100, "groups": []}
    assert audit_stats(world) == none
    assert "mean KL" not in world("store", "stats").stdout


def test_one_in_n_of_many_commands(world: World) -> None:
    found = [audited(world, "--audit", "2") for _ in range(3)]
    assert [each is not None for each in found] == [True, False, True]
    assert found[0] == found[2]
    assert set(found[0]) == {"kl_first", "kl_mean", "top1_agreement"}
    again = world.json("ask", QUESTION, "--ratio", "0.3", "--compare")
    assert found[0]["kl_mean"] == again["compare"]["kl_mean"]
    stats = audit_stats(world)
    assert stats["audited"] == 2
    (group,) = stats["groups"]
    assert group["model"]["name"] == "tiny"
    assert group["ratios"] == [0.3]
    assert group["kl_mean"] == group["kl_worst"] == pytest.approx(found[0]["kl_mean"])


def test_it_is_said_beside_the_answer_and_in_the_stats(world: World) -> None:
    result = world("ask", QUESTION, "--audit", "1")
    assert "audited: mean KL 0." in result.stderr
    assert "audited" not in world("ask", QUESTION, "--audit", "1", "--compare").stderr
    assert "audited" not in world("ask", QUESTION, "--audit", "1", "--mode", "full").stderr
    world.json("ask", QUESTION, "--audit", "1", "--mode", "reuse")
    lines = world("store", "stats").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("audited"))
    assert lines[start].split()[:4] == ["audited", "dtype", "task", "policy"]
    assert [line.split()[:5] for line in lines[start + 1 :]] == [
        ["tiny", "fp32", "qa", "reuse", "no"],
        ["tiny", "fp32", "qa", "question", "yes"],
    ]
    assert lines[start + 2].split()[5:7] == ["0.16", "2"]


def test_tasks_and_transfers_are_kept_apart(world: World) -> None:
    audited(world, "--audit", "1")
    audited(world, "--audit", "1", "--no-transfer")
    line = json.dumps({"question": QUESTION, "task": "summary"})
    assert world("run", "-", "--audit", "1", "--ratio", "0.3", input=line).exit_code == 0
    groups = audit_stats(world)["groups"]
    assert [(g["task"], g["transfer"], g["audited"]) for g in groups] == [
        ("summary", True, 1),
        ("qa", False, 1),
        ("qa", True, 1),
    ]
    log_of(world).write_text(  # as an earlier version wrote it
        "".join(
            json.dumps(
                {k: v for k, v in json.loads(line).items() if k not in ("task", "transfer")}
                | {"v": 1}
            )
            + "\n"
            for line in log_of(world).read_text().splitlines()
        )
    )
    result = world("store", "stats")
    assert "damaged" not in result.stderr
    (group,) = audit_stats(world)["groups"]
    assert (group["task"], group["transfer"], group["audited"]) == ("", None, 3)
    assert result.stdout.splitlines()[-1].split()[:4] == ["tiny", "fp32", "question", "0.3"]


def test_the_setting_has_every_layer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (world.root / "cacheblend.toml").write_text("audit = 1\n")
    assert audited(world) is not None
    assert audited(world, "--audit", "0") is None
    error = world.error("ask", QUESTION, "--audit", "-1", code=2)
    assert "--audit is -1" in error["message"]


def test_damaged_lines_are_left_out_and_told(world: World) -> None:
    audited(world, "--audit", "1")
    with log_of(world).open("a") as file:
        file.write('{"v":1,"kl_mean":"\x1b[2J[bold]"}\n{"v":1,"ti')
    result = world("store", "stats")
    assert "damaged lines of the audit log left out: 2" in result.stderr
    assert "question" in result.stdout
    assert audited(world, "--audit", "1") is not None
    assert audit_stats(world)["audited"] == 2
    assert audit_stats(world)["damaged_lines"] == 2
    assert world("store", "verify").exit_code == 0


def test_text_in_the_log_is_data(world: World) -> None:
    audited(world, "--audit", "1")
    line = json.loads(log_of(world).read_text())
    line |= {"policy": "\x1b[2J[bold]\nx", "dtype": "a\rb", "model": "\x9b31m"}
    log_of(world).write_text(json.dumps(line) + "\n")
    shown = world("store", "stats").stdout
    assert "[bold]" in shown
    assert not any(char in shown for char in "\x1b\r\x9b")


def test_a_log_that_cannot_be_written_or_read_costs_nothing_else(world: World) -> None:
    wanted = world.json("ask", QUESTION)["answer"]
    folder = log_of(world).parent
    folder.write_text("in the way")
    result = world("ask", QUESTION, "--audit", "1", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["answer"] == wanted
    assert json.loads(result.stdout)["audit"] is None
    assert "not audited" in json.loads(result.stderr)["warning"]["message"]
    stats = world("store", "stats")
    assert stats.exit_code == 0
    assert "what was audited could not be read" in stats.stderr
    assert "entries" in stats.stdout


def test_a_store_that_cannot_be_written_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cache_store.store

    monkeypatch.setattr(cache_store.store, "is_writable", lambda path: False)
    result = world("ask", QUESTION, "--audit", "1")
    assert result.exit_code == 0
    assert "the prompt was not audited" in result.stderr
    assert "open for reading only" in result.stderr


def lines_of(count: int) -> str:
    texts = ["The log is bound in calf.", "The pilot boat leaves at six.", "Ropes are coiled."]
    return "".join(
        json.dumps({"id": n, "question": f"What is number {n}?", "chunks": texts[::-1] + texts[:1]})
        + "\n"
        for n in range(count)
    )


@pytest.mark.parametrize("more", [(), ("--devices", "cpu,cpu")], ids=["one", "two"])
def test_run_audits_lines_by_their_number_in_order(world: World, more: tuple[str, ...]) -> None:
    """The first line fills the store, so that nothing of it is used: it is not audited."""
    prompts = world.root / "prompts.jsonl"
    prompts.write_text(lines_of(9))
    world("run", "prompts.jsonl")  # so that with two workers each line finds its chunks
    result = world("run", "prompts.jsonl", "--audit", "4", "--ratio", "0.3", "--json", *more)
    assert result.exit_code == 0, result.stderr
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["id"] for record in records] == list(range(9))
    assert [r["line"] for r in records if r["audit"] is not None] == [1, 5, 9]
    assert audit_stats(world)["audited"] == 3
    shown = {record["audit"]["kl_mean"] for record in records if record["audit"]}
    logged = {json.loads(line)["kl_mean"] for line in log_of(world).read_text().splitlines()}
    assert shown == logged


def test_run_goes_on_where_an_audit_fails(world: World) -> None:
    (world.root / "prompts.jsonl").write_text(lines_of(2))
    world("run", "prompts.jsonl")
    log_of(world).parent.write_text("in the way")
    result = world("run", "prompts.jsonl", "--audit", "1")
    assert result.exit_code == 0
    assert [json.loads(line)["audit"] for line in result.stdout.splitlines()] == [None, None]
    assert "line 2: the prompt was not audited" in result.stderr


def test_lines_answered_before_are_kept_whether_audited_or_not(world: World) -> None:
    (world.root / "prompts.jsonl").write_text(lines_of(3))
    world("run", "prompts.jsonl", "--output", "answers.jsonl")
    args = ("run", "prompts.jsonl", "--output", "answers.jsonl", "--resume", "--audit", "1")
    assert world.json(*args)["kept"] == 3
    assert not log_of(world).exists()
