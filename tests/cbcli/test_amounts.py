"""How much is recomputed and what selects it, as commands are told: ratios, thresholds, specs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cbcli.terminal import run as terminal
from tests.cbcli.world import World

QUESTION = "Who keeps the log of every boat?"


@pytest.fixture
def project(world: World) -> Any:
    """The project's settings file, gone again after the test."""
    path = world.root / "cacheblend.toml"
    yield path
    path.unlink(missing_ok=True)


def asked(world: World, *args: str) -> tuple[list[float], float | None]:
    result = world.json("ask", QUESTION, *args)
    return result["ratios"], result["threshold"]


def test_json_says_what_was_asked_for(world: World) -> None:
    plain = world.json("ask", QUESTION)
    assert (plain["policy"], plain["ratios"], plain["threshold"]) == ("question", [0.16], None)
    assert plain["transfer"] is True
    some = world.json("ask", QUESTION, "--threshold", "0.5")
    assert (some["ratios"], some["threshold"]) == ([], 0.5)
    assert 0 < some["recomputed"]["tokens"] < plain["recomputed"]["tokens"] / 0.16
    assert world.json("ask", QUESTION, "--no-transfer")["transfer"] is False
    value = world.json("ask", QUESTION, "--policy", "value")
    assert value["transfer"] is False
    assert world.json("ask", QUESTION, "--policy", "value", "--transfer")["transfer"] is True


def test_thresholds_are_exact_at_their_ends(world: World) -> None:
    none = world.json("ask", QUESTION, "--threshold", "0")
    assert none["recomputed"]["tokens"] == 0
    assert none["first_token"] == world.json("ask", QUESTION, "--mode", "reuse")["first_token"]
    every = world.json("ask", QUESTION, "--threshold", "1", "--compare")
    assert every["recomputed"]["fraction"] == 1
    assert every["compare"]["kl_mean"] < 1e-6


def test_what_is_set_nearer_to_the_command_counts(
    world: World, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write_text("threshold = 0.5\n")
    assert asked(world) == ([], 0.5)
    assert asked(world, "--ratio", "0.3") == ([0.3], None)
    assert asked(world, "--threshold", "0.25") == ([], 0.25)
    project.write_text("ratio = 0.3\n")
    assert asked(world, "--threshold", "0.25") == ([], 0.25)
    project.write_text("threshold = 0.5\nratio = 0.3\n")
    error = world.error("ask", QUESTION, code=2)
    assert "exclude each other" in error["message"]
    assert asked(world, "--ratio", "0.2") == ([0.2], None)

    def with_environment(name: str, value: str, *args: str) -> tuple[list[float], float | None]:
        env = {
            "CACHEBLEND_HOME": str(world.root / "home"),
            "CACHEBLEND_MODEL": "tiny",
            "CACHEBLEND_DTYPE": "fp32",
            "CACHEBLEND_MIN_TOKENS": "0",
            "CACHEBLEND_MAX_TOKENS": "1",
            name: value,
        }
        result = json.loads(terminal("ask", QUESTION, "--json", *args, env=env).stdout)
        return result["ratios"], result["threshold"]

    assert with_environment("CACHEBLEND_THRESHOLD", "0.75") == ([], 0.75)
    assert with_environment("CACHEBLEND_RATIO", "0.4") == ([0.4], None)
    assert with_environment("CACHEBLEND_THRESHOLD", "0.75", "--ratio", "0.1") == ([0.1], None)
    assert with_environment("CACHEBLEND_RATIO", "0.4", "--threshold", "0.1") == ([], 0.1)


def test_a_threshold_set_somewhere_is_no_matter_for_chosen_positions(
    world: World, project: Path
) -> None:
    project.write_text("threshold = 0.5\n")
    segments = world.json("ask", QUESTION)["prompt"]["segments"]
    at = next(s["start"] for s in segments if s["status"] == "hit")
    result = world.json("ask", QUESTION, "--indices", str(at))
    assert (result["policy"], result["threshold"]) == ("explicit", None)
    assert result["recomputed"]["tokens"] == 1


def test_both_as_flags_are_refused(world: World) -> None:
    for command in (("ask", QUESTION), ("run", "-")):
        error = world.error(
            *command, "--ratio", "0.1", "--threshold", "0.5", code=2, input=as_lines({})
        )
        assert error["message"] == "--ratio and --threshold exclude each other"


@pytest.mark.parametrize("policy", ["random", "first-k", "hybrid"])
def test_policies_without_amounts_take_no_threshold(world: World, policy: str) -> None:
    for command in (("ask", QUESTION), ("run", "-")):
        args = ("--policy", policy, "--threshold", "0.5")
        error = world.error(*command, *args, code=2, input=as_lines({}))
        assert f"policy {policy} has no amounts" in error["message"]
        assert error["hint"] == "use a ratio"


@pytest.mark.parametrize("share", ["-0.1", "1.01", "nan", "inf", "half", ""])
def test_what_is_no_share_is_refused(world: World, share: str) -> None:
    error = world.error("ask", QUESTION, f"--threshold={share}", code=2)
    assert "threshold" in error["message"]
    assert "0 to 1" in error["message"] + error["hint"]


SPECS = [
    "question:",
    "question:layers=",
    "question:layers=8-20,layers=3",
    "question:layers=99",
    "question:size=3",
    "first-k:k=-1",
    "hybrid:question=0",
    "hybrid:hybrid=1",
    "quéstion",
    "question:ключ=1",
    "question:[red]=1",
    "question:\x1b[31m=1",
    "question:layers=1\nerror: another line",
    "question:layers=1" + "0" * 5000,
    "first-k:" + "k" * 5000 + "=3",
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: ascii(spec)[:30])
def test_bad_specs_are_one_clear_line(world: World, spec: str) -> None:
    error = world.error("ask", QUESTION, "--policy", spec, code=2)
    assert "policy" in error["message"]
    assert error["hint"] or "is not a whole number" in error["message"]
    assert len(error["message"]) < 300
    said = world("ask", QUESTION, "--policy", spec)
    assert (said.exit_code, said.stdout) == (2, "")
    assert said.stderr.count("\n") == 1
    assert "\x1b" not in said.stderr


@pytest.mark.parametrize("spec", ["question:", "first-k:k=x", "hybrid:nobody=1"])
def test_a_bad_spec_is_wrong_with_all_lines(
    world: World, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbcli.lines.runner.load_engine", lambda *_: pytest.fail("it was loaded"))
    error = world.error("run", "-", "--policy", spec, code=2, input=as_lines({}, {}))
    assert "policy" in error["message"]


@pytest.mark.parametrize(
    "spec",
    [
        "question:layers=1-2",
        "question:heads=max,weight=none",
        "first-k:k=2",
        "hybrid:question=0.7,value=0.3",
    ],
)
def test_a_spec_with_parameters_is_kept_as_it_is(world: World, spec: str) -> None:
    result = world.json("ask", QUESTION, "--policy", spec)
    assert result["policy"] == spec
    assert result["recomputed"]["tokens"] > 0


def test_the_settings_file_takes_specs_and_transfer(world: World, project: Path) -> None:
    project.write_text('policy = "first-k:k=1"\ntransfer = true\n')
    result = world.json("ask", QUESTION)
    hits = [s for s in result["prompt"]["segments"] if s["status"] == "hit"]
    assert (result["policy"], result["transfer"]) == ("first-k:k=1", True)
    assert result["recomputed"]["tokens"] == len(hits) > 0
    project.write_text("transfer = false\n")
    assert world.json("ask", QUESTION)["transfer"] is False


def as_lines(*own: dict[str, Any]) -> str:
    return "".join(json.dumps({"question": QUESTION, **line}) + "\n" for line in own)


def test_lines_have_amounts_of_their_own(world: World) -> None:
    lines = [
        {},
        {"threshold": 0.5},
        {"ratio": 0.3},
        {"ratio": 0.3, "threshold": 0.5},
        {"policy": "random"},
        {"policy": "random", "ratio": 0.2},
        {"transfer": False},
        {"policy": "question:layers=99"},
        {"policy": "hybrid:hybrid=1", "ratio": 0.1},
        {"threshold": 2},
        {"threshold": True},
        {"transfer": "maybe"},
    ]
    result = world("run", "-", "--threshold", "0.25", input=as_lines(*lines))
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    amounts = [(r.get("ratios"), r.get("threshold")) for r in found]
    assert amounts[:3] == [([], 0.25), ([], 0.5), ([0.3], None)]
    assert "exclude each other" in found[3]["error"]["message"]
    assert "no amounts" in found[4]["error"]["message"]
    assert amounts[5] == ([0.2], None)
    assert found[6]["transfer"] is False
    for record in found[7:]:
        assert record["error"]["kind"] == "usage"
    by_ratio = world("run", "-", "--ratio", "0.4", input=as_lines({}, {"threshold": 0.5}))
    found = [json.loads(line) for line in by_ratio.stdout.splitlines()]
    assert [(r["ratios"], r["threshold"]) for r in found] == [([0.4], None), ([], 0.5)]
