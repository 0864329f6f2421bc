"""`cacheblend calibrate`, and what `ask`, `run` and `doctor` do with what it keeps."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_store.errors import UsageError
from cbcli.settings import load_settings
from cbcli.values import AUTO
from engine.calibration.outcome import GateCheck
from engine.calibration.speed import Speed
from tests.cbcli.world import World, make_world

QUESTION = "Who keeps the log of every boat?"
GOOD = [GateCheck("one", 0.1, 0.2, "said"), GateCheck("two", 4.0, 3.0, "said", True)]
BAD = [GOOD[0], GateCheck("declared RoPE", 1.5, 0.05, "said")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, str]:
    """A world, and the profile that its model gets, without its folder."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("world"), patch)
        world.json("ingest", "docs", "--chunk-tokens", "24")
        given(patch, GOOD)
        calibrate(world)
    text = profile_file(world).read_text()
    profile_file(world).unlink()
    return world, text


@pytest.fixture
def world(made: tuple[World, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Without a profile. The gate and the speed are measured elsewhere (`tests/engine`); here they
    are given."""
    world, _ = made
    monkeypatch.chdir(world.root)
    given(monkeypatch, GOOD)
    yield world
    for file in (profile_file(world), world.root / "cacheblend.toml", seen_file(world)):
        file.unlink(missing_ok=True)


def given(monkeypatch: pytest.MonkeyPatch, checks: list[GateCheck]) -> None:
    def speed(where: Any, folder: Path) -> Speed:
        import torch

        from engine.calibration.speed import here

        place, threads = here(where.engine.model.device), torch.get_num_threads()
        return Speed(place, threads, ((512, 1e3),), 0, 1e-6, 0, 64, 1e12, None)

    @contextmanager
    def ground(engine: Any) -> Iterator[Any]:
        yield SimpleNamespace(engine=engine)

    monkeypatch.setattr("engine.calibration.ground.ground", ground)
    monkeypatch.setattr("engine.calibration.gate.gate_checks", lambda where: iter(checks))
    monkeypatch.setattr("engine.calibration.speed_probe.measure_speed", speed)


def calibrate(world: World, *args: str, code: int = 0) -> Any:
    few = ("--policies", "value,key", "--ratios", "0.3,0.6", "--limit", "3")
    return world.json("calibrate", *few, *args, code=code)


def profile_file(world: World) -> Path:
    return world.root / "home/models/tiny/calibration/fp32-cpu.json"


def seen_file(world: World) -> Path:
    return world.root / "home/bandwidth.json"


def test_calibrate_keeps_a_profile_beside_the_model(world: World) -> None:
    result = calibrate(world)
    assert result == json.loads(profile_file(world).read_text())
    assert result["schema"] == 1
    assert result["gate"]["passed"] is True
    (task,) = result["tasks"]
    assert (task["task"], task["context"], task["prompts"]) == ("qa", "prefix", 3)
    assert task["material"] == "stored chunks"
    curves = {curve["policy"]: curve["points"] for curve in task["curves"]}
    assert set(curves) == {"value", "key", "random"}
    assert task["policy"] in ("value", "key")
    for points in curves.values():
        assert [point["ratio"] for point in points] == [0, 0.3, 0.6, 1]
        fitted = [point["fitted"] for point in points]
        assert fitted == sorted(fitted, reverse=True)
        assert points[-1]["kl"] == pytest.approx(0, abs=1e-9)  # all of it computed
        assert points[0]["kl"] == curves["value"][0]["kl"] > 0


def test_the_passages_are_computed_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the gate and the speed together."""
    from engine.calibration import gate, ground, speed_probe

    open_ground, checks, speed = ground.ground, gate.gate_checks, speed_probe.measure_speed
    seen: list[tuple[str, Any]] = []

    @contextmanager
    def counted(engine: Any) -> Iterator[Any]:
        with open_ground(engine) as where:
            seen.append(("computed", where))
            yield where
        seen.append(("gone", where))

    def checked(where: Any) -> Any:
        seen.append(("gate", where))
        return checks(where)

    def measured(where: Any, folder: Path) -> Speed:
        seen.append(("speed", where))
        return speed(where, folder)

    monkeypatch.setattr(ground, "ground", counted)
    monkeypatch.setattr(gate, "gate_checks", checked)
    monkeypatch.setattr(speed_probe, "measure_speed", measured)
    calibrate(world)
    assert [what for what, _ in seen] == ["computed", "gate", "speed", "gone"]
    assert all(where is seen[0][1] for _, where in seen)


def test_the_table_names_the_choice(world: World) -> None:
    result = world("calibrate", "--policies", "value", "--ratios", "0.5", "--limit", "2")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "tiny, fp32 on cpu"
    assert [line.split()[0] for line in lines[1:4]] == ["gate", "ok", "ok"]
    assert any(line.startswith("qa: 2 prompts of stored chunks") for line in lines)
    assert any(line.startswith("for a mean KL of 0.02: policy value, ratio ") for line in lines)


def test_tasks_and_questions_are_kept_apart(world: World, tmp_path: Path) -> None:
    calibrate(world)
    file = tmp_path / "questions.jsonl"
    lines = [{"question": f"What of {n}?", "chunks": ["A pilot.", "A boat."]} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, lines)))
    both = calibrate(world, "--task", "summary", "--questions", str(file))
    found = {task["task"]: (task["material"], task["prompts"]) for task in both["tasks"]}
    assert found == {"qa": ("stored chunks", 3), "summary": ("questions", 3)}


def test_a_gate_that_fails_is_exit_4_and_stops_blending(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, BAD)
    result = world("calibrate", "--json")
    assert result.exit_code == 4
    assert json.loads(result.stdout)["gate"]["passed"] is False
    assert json.loads(result.stdout)["tasks"] == []  # nothing else was measured
    error = json.loads(result.stderr.splitlines()[-1])["error"]
    assert (error["kind"], "declared RoPE is 1.5" in error["message"]) == ("integrity", True)
    for mode in ("blend", "reuse"):
        refused = world.error("ask", QUESTION, "--mode", mode, code=4)
        assert "declared RoPE" in refused["message"]
    world.json("ask", QUESTION, "--mode", "full")
    world.json("ask", QUESTION, "--mode", "prefix")
    forced = world("ask", QUESTION, "--force", "--json", "-v")
    assert json.loads(forced.stdout)["ratios"] == [0.16]
    overruled = [line for line in forced.stderr.splitlines() if "overruled" in line]
    assert len(overruled) == 1
    assert "declared RoPE" in json.loads(overruled[0])["warning"]["message"]
    assert "no calibration" not in forced.stderr
    assert "no calibration" not in world("ask", QUESTION, "--force", "-v").stderr
    line = json.dumps({"question": QUESTION})
    answers = world("run", "-", input=line)
    assert answers.exit_code == 1
    assert "declared RoPE" in json.loads(answers.stdout)["error"]["message"]
    given(monkeypatch, GOOD)
    assert world.json("calibrate", "--gate-only")["gate"]["passed"] is True
    world.json("ask", QUESTION)


@pytest.fixture
def calibrated(world: World, made: tuple[World, str]) -> World:
    """With a profile whose figures are made up, so that every look-up has one answer."""
    value = json.loads(made[1])
    (task,) = value["tasks"]
    task |= {"policy": "key", "ratio": "0.3", "target_kl": 0.05}
    for curve in task["curves"]:
        for point, kl in zip(curve["points"], (0.2, 0.05, 0.02, 0.0), strict=True):
            point["kl"] = point["fitted"] = kl
    profile_file(world).write_text(json.dumps(value))
    return world


def choice(world: World, *args: str, **options: Any) -> tuple[str, list[float]]:
    result = world.json("ask", QUESTION, *args, **options)
    return result["policy"], result["ratios"]


def test_ask_takes_policy_and_ratio_where_neither_is_set(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice(calibrated) == ("key", [0.3])
    assert choice(calibrated, "--ratio", "0.5") == ("question", [0.5])
    assert choice(calibrated, "--policy", "random") == ("random", [0.16])
    assert choice(calibrated, "--task", "summary") == ("question", [0.16])  # none for that
    said = calibrated("ask", QUESTION, "-v").stderr
    assert "policy key, ratio 0.3: calibrated for a mean KL of 0.05 (qa, 20" in said
    assert "calibrat" not in calibrated("ask", QUESTION).stderr
    (calibrated.root / "cacheblend.toml").write_text("ratio = 0.4\n")
    assert choice(calibrated) == ("question", [0.4])


def test_without_a_profile_only_v_says_so(world: World) -> None:
    assert "calibrat" not in world("ask", QUESTION).stderr
    assert "cacheblend calibrate" in world("ask", QUESTION, "-v").stderr
    for args in (("--target-kl", "0.1"), ("--ratio", "auto")):
        error = world.error("ask", QUESTION, *args, code=2)
        assert "cacheblend calibrate" in error["hint"]


def test_a_target_kl_finds_the_smallest_ratio(calibrated: World) -> None:
    assert choice(calibrated, "--target-kl", "0.05") == ("key", [0.3])
    assert choice(calibrated, "--target-kl", "0.035") == ("key", [0.45])
    assert choice(calibrated, "--target-kl", "0.3") == ("key", [0.0])
    assert choice(calibrated, "--target-kl", "0.02", "--policy", "value") == ("value", [0.6])
    error = calibrated.error("ask", QUESTION, "--target-kl", "1", "--policy", "key+value", code=2)
    assert "--policies key+value" in error["hint"]
    error = calibrated.error("ask", QUESTION, "--target-kl", "1", "--ratio", "0.1", code=2)
    assert "exclude" in error["message"]


def test_the_stronger_of_target_and_ratio_counts(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (calibrated.root / "cacheblend.toml").write_text("target_kl = 0.05\n")
    assert choice(calibrated) == ("key", [0.3])
    assert choice(calibrated, "--ratio", "0.1") == ("question", [0.1])
    (calibrated.root / "cacheblend.toml").write_text("ratio = 0.1\n")
    assert choice(calibrated, "--target-kl", "0.05") == ("key", [0.3])
    (calibrated.root / "cacheblend.toml").write_text("ratio = 0.1\ntarget_kl = 0.02\n")
    assert choice(calibrated) == ("key", [0.6])


def test_a_threshold_set_nearer_counts(calibrated: World) -> None:
    """Over a calibration's choice, a target and the ratio auto; a target set nearer, over it."""

    def amount(*args: str) -> tuple[float | None, str]:
        result = calibrated.json("ask", QUESTION, *args)
        return result["threshold"], result["policy"]

    project = calibrated.root / "cacheblend.toml"
    assert amount("--threshold", "0.5") == (0.5, "question")
    for text in ("target_kl = 0.05\n", 'ratio = "auto"\n'):
        project.write_text(text)
        assert amount() == (None, "key")
        assert amount("--threshold", "0.5") == (0.5, "question")
    project.write_text("threshold = 0.5\n")
    assert amount() == (0.5, "question")
    assert amount("--target-kl", "0.05") == (None, "key")
    assert amount("--ratio", "auto") == (None, "key")
    for args in (("--target-kl", "0.05"), ("--ratio", "auto")):
        error = calibrated.error("ask", QUESTION, "--threshold", "0.5", *args, code=2)
        assert "exclude each other" in error["message"]
    lines = [{"question": QUESTION, "target_kl": 0.05}, {"question": QUESTION}]
    lines.append({"question": QUESTION, "target_kl": 0.05, "threshold": 0.5})
    result = calibrated("run", "-", input="\n".join(map(json.dumps, lines)))
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["threshold"] for line in found[:2]] == [None, 0.5]
    assert "exclude" in found[2]["error"]["message"]


@pytest.mark.parametrize("mode", ["full", "prefix", "reuse"])
def test_ratio_auto_is_no_matter_where_no_ratio_counts(calibrated: World, mode: str) -> None:
    assert choice(calibrated, "--ratio", "auto", "--mode", mode)[0] == "question"


def test_ratio_auto_is_never_under_the_minimum_and_rises_with_slow_storage(
    calibrated: World,
) -> None:
    assert choice(calibrated, "--ratio", "auto") == ("key", [0.3])
    assert choice(calibrated, "--ratio", "auto", "--target-kl", "0.02")[1] == [0.6]
    store = calibrated.root / "home/store"
    seen_file(calibrated).write_text(json.dumps({str(store): 10.0}))  # bytes a second
    assert choice(calibrated, "--ratio", "auto") == ("key", [1.0])
    (calibrated.root / "cacheblend.toml").write_text('ratio = "auto"\n')
    assert choice(calibrated) == ("key", [1.0])
    shown = calibrated.json("config", "show")["ratio"]
    assert (shown["value"], shown["origin"]) == ("auto", "project")


def test_audited_prompts_off_the_target_raise_what_auto_chooses(calibrated: World) -> None:
    audited = calibrated.json("ask", QUESTION, "--ratio", "auto", "--audit", "1", "--compare")
    assert audited["ratios"] == [0.3]  # before anything was seen
    seen = audited["compare"]["kl_mean"]
    value = json.loads(profile_file(calibrated).read_text())
    for curve in value["tasks"][0]["curves"]:
        for point, times in zip(curve["points"], (4, 0.4, 0.2, 0), strict=True):
            point["fitted"] = seen * times  # 0.3 was to be good enough
    profile_file(calibrated).write_text(json.dumps(value))
    above, below = (f"{seen * factor:.12f}" for factor in (0.5, 2))
    raised = choice(calibrated, "--ratio", "auto", "--target-kl", above)[1][0]
    assert raised > choice(calibrated, "--target-kl", above)[1][0]
    same = choice(calibrated, "--ratio", "auto", "--target-kl", below)
    assert same == choice(calibrated, "--target-kl", below)
    stricter = f"{seen * 0.21:.12f}"  # takes a larger ratio, of which nothing was seen
    same = choice(calibrated, "--ratio", "auto", "--target-kl", stricter)
    assert same == choice(calibrated, "--target-kl", stricter)


@pytest.mark.parametrize("other", [("--task", "summary"), ("--transfer",), ()], ids=str)
def test_only_audits_of_the_same_task_and_transfer_raise_what_auto_chooses(
    calibrated: World, other: tuple[str, ...]
) -> None:
    shutil.rmtree(calibrated.root / "home/store/audit", ignore_errors=True)
    blended = ("--policy", "key", "--ratio", "0.3", "--audit", "1", *other)
    seen = calibrated.json("ask", QUESTION, *blended)["audit"]["kl_mean"]
    value = json.loads(profile_file(calibrated).read_text())
    for curve in value["tasks"][0]["curves"]:
        for point, times in zip(curve["points"], (4, 0.4, 0.2, 0), strict=True):
            point["fitted"] = seen * times  # 0.3 was to be good enough
    profile_file(calibrated).write_text(json.dumps(value))
    target = ("--target-kl", f"{seen * 0.5:.12f}")
    auto, calm = (choice(calibrated, *more, *target)[1] for more in (("--ratio", "auto"), ()))
    assert auto == calm if other else auto > calm


def test_run_looks_up_every_line_by_itself(calibrated: World) -> None:
    lines = [
        {"question": QUESTION},
        {"question": QUESTION, "ratio": 0.5},
        {"question": QUESTION, "target_kl": 0.02},
        {"question": QUESTION, "ratio": "auto"},
        {"question": QUESTION, "ratio": 0.5, "target_kl": 0.02},
    ]
    result = calibrated("run", "-", input="\n".join(map(json.dumps, lines)))
    found = [json.loads(line) for line in result.stdout.splitlines()]
    chosen = [(line["policy"], line["ratios"]) for line in found[:4]]
    assert chosen == [("key", [0.3]), ("question", [0.5]), ("key", [0.6]), ("key", [0.3])]
    assert "exclude" in found[4]["error"]["message"]


def test_a_damaged_profile_is_told_of_and_as_good_as_none(calibrated: World) -> None:
    profile_file(calibrated).write_text("{")
    result = calibrated("ask", QUESTION)
    assert result.exit_code == 0
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    assert "fp32-cpu.json is damaged" in warnings[0]
    assert "whether the model passed its gate isn't known" in warnings[0]
    checks = {check["name"]: check for check in doctor(calibrated)}
    assert checks["calibration"]["state"] == "warn"
    assert "gate isn't known" in checks["calibration"]["found"]
    calibrate(calibrated)
    assert "warning" not in calibrated("ask", QUESTION).stderr


def doctor(world: World) -> list[dict[str, Any]]:
    result = world("doctor", "--no-probe", "--json")
    found: list[dict[str, Any]] = json.loads(result.stdout)["checks"]
    return found


def test_doctor_has_a_line(calibrated: World, monkeypatch: pytest.MonkeyPatch) -> None:
    check = next(c for c in doctor(calibrated) if c["name"] == "calibration")
    assert check["state"] == "ok"
    assert "qa, context prefix: key at 0.3" in check["found"]
    given(monkeypatch, BAD)
    calibrated("calibrate", "--gate-only")
    check = next(c for c in doctor(calibrated) if c["name"] == "calibration")
    assert (check["state"], "declared RoPE" in check["found"]) == ("fail", True)
    profile_file(calibrated).unlink()
    check = next(c for c in doctor(calibrated) if c["name"] == "calibration")
    assert (check["state"], "none for fp32" in check["found"]) == ("ok", True)


def test_doctor_hashes_no_weights_that_are_known(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = calibrated.root / "home/fingerprints.json"
    known = memo.read_text()
    with monkeypatch.context() as patch:
        patch.setattr("engine.fingerprint._file_digests", hashes_nothing)
        patch.setattr("cbcli.calibration_check.LARGEST_HASHED", 0)  # a large model
        check = next(c for c in doctor(calibrated) if c["name"] == "calibration")
    assert "key at 0.3" in check["found"]
    try:
        memo.write_text("{}")
        check = next(c for c in doctor(calibrated) if c["name"] == "calibration")
        assert "key at 0.3" in check["found"]
        assert memo.read_text() == "{}"  # it changes nothing
    finally:
        memo.write_text(known)


def hashes_nothing(*args: Any) -> Any:
    raise AssertionError("the weights were hashed")


def test_interrupted_it_leaves_what_was_there(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = profile_file(calibrated).read_text()

    def interrupted(where: Any, folder: Path) -> Speed:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.calibration.speed_probe.measure_speed", interrupted)
    result = calibrated("calibrate", "--policies", "value", "--ratios", "0.5", "--limit", "2")
    assert result.exit_code == 130
    assert profile_file(calibrated).read_text() == before
    assert [f.name for f in profile_file(calibrated).parent.iterdir()] == ["fp32-cpu.json"]


def test_the_device_table(calibrated: World) -> None:
    table = calibrated.json("calibrate", "--device-table", "--ratios", "0.1,0.5")
    assert {cell["ratio"] for cell in table["cells"]} == {0.1, 0.5}
    for cell in table["cells"]:
        assert cell["hidden"] == (cell["load_s"] <= cell["recompute_s"])
        enough = table["enough"][f"{cell['ratio']:g}"]
        assert cell["hidden"] == (cell["bandwidth"] >= enough)
    text = calibrated("calibrate", "--device-table", "--ratios", "0.1,0.5").stdout
    assert {"hidden", "waited"} & set(text.split())


def test_flags_that_do_not_go_together(world: World) -> None:
    world.error("calibrate", "--gate-only", "--device-table", code=2)
    world.error("calibrate", "--questions", "q.json", "--built-in", code=2)
    world.error("calibrate", "--ratios", "2", code=2)
    world.error("calibrate", "--task", "poem", code=2)
    world.error("calibrate", "--target-kl", "0", code=2)
    world.error("calibrate", "--questions", "nowhere.json", code=3)
    world.error("calibrate", "--policies", "explicit", code=2)


def test_run_finds_a_failed_gate_before_the_weights(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, BAD)
    assert world("calibrate").exit_code == 4
    lines = "\n".join(json.dumps({"question": QUESTION}) for _ in range(2))
    with monkeypatch.context() as patch:
        measures_nothing(patch)
        result = world("run", "-", input=lines)
    assert result.exit_code == 1
    errors = [json.loads(line)["error"]["message"] for line in result.stdout.splitlines()]
    assert ["declared RoPE" in error for error in errors] == [True, True]
    mixed = [{"question": QUESTION}, {"question": QUESTION, "mode": "full"}]
    result = world("run", "-", input="\n".join(map(json.dumps, mixed)))
    assert ["error" in json.loads(line) for line in result.stdout.splitlines()] == [True, False]
    result = world("run", "-", "--force", input=lines)
    assert result.exit_code == 0
    assert result.stderr.count("overruled") == 1


def test_run_over_devices_says_once_what_is_wrong(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"question": QUESTION})
    profile_file(calibrated).write_text("{")
    result = calibrated("run", "-", "--devices", "cpu,cpu", input=line)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("fp32-cpu.json is damaged") == 1
    given(monkeypatch, BAD)
    calibrated("calibrate")
    result = calibrated("run", "-", "--devices", "cpu,cpu", "--force", input=line)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("overruled") == 1
    assert calibrated("run", "-", "--devices", "cpu,cpu", input=line).exit_code == 1


@pytest.mark.parametrize(
    ("args", "said", "hint"),
    [
        (("--transfer",), "with --transfer", "transfer"),
        (("--check-layer", "2"), "at check layer 2", "--policies key --check-layer 2"),
        (("--check-layer", "1", "--check-layer", "2"), "at check layers 1, 2", "one"),
    ],
)
def test_what_was_measured_otherwise_is_not_calibrated(
    calibrated: World, args: tuple[str, ...], said: str, hint: str
) -> None:
    for wanted in (("--target-kl", "0.05"), ("--ratio", "auto")):
        error = calibrated.error("ask", QUESTION, *wanted, *args, code=2)
        assert f"policy key isn't calibrated {said}" in error["message"]
        assert hint in error["hint"]
    chosen = calibrated.json("ask", QUESTION, *args)
    assert (chosen["policy"], set(chosen["ratios"])) == ("question", {0.16})
    assert f"isn't calibrated {said}" in calibrated("ask", QUESTION, *args, "-v").stderr


def test_what_is_as_it_was_measured_is_calibrated(calibrated: World) -> None:
    for args in (("--no-transfer",), ("--check-layer", "1")):
        assert choice(calibrated, *args) == ("key", [0.3])
        assert choice(calibrated, *args, "--target-kl", "0.05") == ("key", [0.3])


def test_check_layers_of_a_policy_that_needs_none(calibrated: World) -> None:
    """One changes nothing; at several the policy chooses several times."""
    asked = ("--policy", "random", "--target-kl", "0.05")
    assert choice(calibrated, *asked, "--check-layer", "2") == ("random", [0.3])
    layers = ("--check-layer", "1", "--check-layer", "2")
    assert "layers 1, 2" in calibrated.error("ask", QUESTION, *asked, *layers, code=2)["message"]


def rewrite(world: World, **changed: Any) -> None:
    """Profile with other values."""
    value = json.loads(profile_file(world).read_text())
    profile_file(world).write_text(json.dumps(value | changed))


def test_another_versions_calibration_does_not_count(calibrated: World) -> None:
    rewrite(calibrated, version="0.0.1")
    assert choice(calibrated) == ("question", [0.16])
    said = calibrated("ask", QUESTION, "-v").stderr
    assert "calibrated by another version (0.0.1): calibrate again" in said
    assert "version" not in calibrated("ask", QUESTION).stderr
    for wanted in (("--target-kl", "0.05"), ("--ratio", "auto")):
        error = calibrated.error("ask", QUESTION, *wanted, code=2)
        assert "another version (0.0.1)" in error["message"]
    check = next(c for c in doctor(calibrated) if c["name"] == "calibration")
    assert "another version (0.0.1): calibrate again" in check["found"]
    result = calibrate(calibrated, "--task", "summary")
    assert [task["task"] for task in result["tasks"]] == ["summary"]  # no old one under a new name


def test_a_gate_that_failed_with_another_version_is_only_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, BAD)
    world("calibrate")
    rewrite(world, version="0.0.1")
    result = world("ask", QUESTION)
    assert result.exit_code == 0
    (warning,) = (line for line in result.stderr.splitlines() if line.startswith("warning:"))
    assert "another version (0.0.1): declared RoPE" in warning
    check = next(c for c in doctor(world) if c["name"] == "calibration")
    assert (check["state"], "declared RoPE" in check["found"]) == ("warn", True)


def test_a_speed_with_other_threads_does_not_count(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = json.loads(profile_file(calibrated).read_text())["speed"]
    threads = str(speed["threads"])
    assert choice(calibrated, "--ratio", "auto", "--threads", threads) == ("key", [0.3])
    rewrite(calibrated, speed=speed | {"threads": speed["threads"] + 1})
    error = calibrated.error("ask", QUESTION, "--ratio", "auto", "--threads", threads, code=2)
    assert "threads" in error["message"]
    assert choice(calibrated) == ("key", [0.3])  # needs no speed

    def measured(*args: Any) -> Speed:
        return Speed(speed["machine"], 1, ((512, 1e3),), 0, 3e-6, 0, 64, 1e12, None)

    monkeypatch.setattr("cbcli.commands.calibrate._speed", measured)
    table = calibrated.json("calibrate", "--device-table", "--threads", threads)
    assert table["cells"][0]["recompute_s"] > 2e-6 * 0.05 * 4040  # measured anew


def test_the_audit_log_is_read_again_only_where_it_changed(
    calibrated: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine.audit import AuditLog

    read, times = AuditLog.records, []

    def counted(log: AuditLog) -> Any:
        times.append(1)
        return read(log)

    monkeypatch.setattr(AuditLog, "records", counted)
    lines = "\n".join(json.dumps({"question": QUESTION}) for _ in range(6))
    assert calibrated("run", "-", "--ratio", "auto", input=lines).exit_code == 0
    assert len(times) == 1
    times.clear()
    assert calibrated("run", "-", "--ratio", "auto", "--audit", "3", input=lines).exit_code == 0
    assert len(times) == 3  # before the first, and after the first and the fourth


def test_ratios_that_leave_nothing_to_measure_are_refused_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    measures_nothing(monkeypatch)
    for ratios in ("0", "1", "0,1"):
        for table in ((), ("--device-table",)):
            error = world.error("calibrate", "--ratios", ratios, *table, code=2)
            assert f"--ratios {ratios}" in error["message"]


def measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> Any:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("engine.api.Engine.load", load)


def test_one_check_layer_of_the_model_is_measured_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = calibrate(world, "--check-layer", "2")
    (task,) = result["tasks"]
    layers = {curve["policy"]: curve["check_layers"] for curve in task["curves"]}
    assert layers == {"value": [2], "key": [2], "random": None}
    measures_nothing(monkeypatch)
    error = world.error("calibrate", "--check-layer", "1", "--check-layer", "2", code=2)
    assert "--check-layer once" in error["hint"]
    error = world.error("calibrate", "--check-layer", "99", code=2)
    assert "layer 99 is not in this model" in error["message"]
    (world.root / "cacheblend.toml").write_text("check_layers = [1, 2]\n")
    assert "cacheblend.toml" in world.error("calibrate", code=2)["message"]


def test_the_gate_alone_reads_no_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: Any, **options: Any) -> Any:
        raise AssertionError("the store was read")

    monkeypatch.setattr("cache_store.store.ChunkStore.open", opened)
    assert world.json("calibrate", "--gate-only")["gate"]["passed"] is True


def test_a_prompt_that_is_too_long_is_told_of_with_flags_that_are_there(
    world: World, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "Who?", "chunks": ["A pilot. " * 2000, "A boat."]}))
    error = world.error("calibrate", "--questions", str(file), code=2)
    assert "leaves no room in the context" in error["message"]
    assert "--passages" not in error["hint"]


def test_auto_is_a_ratio_of_settings(tmp_path: Path) -> None:
    assert load_settings({"ratio": "auto"}, env={}, cwd=tmp_path).ratio == AUTO
    assert load_settings({"ratio": "0.2"}, env={}, cwd=tmp_path).ratio == (Decimal("0.2"),)
    with pytest.raises(UsageError, match="--ratio and --target-kl exclude each other"):
        load_settings({"ratio": "0.2", "target_kl": 0.1}, env={}, cwd=tmp_path)
    env = {"CACHEBLEND_TARGET_KL": "0.1"}
    assert load_settings({"ratio": "0.2"}, env=env, cwd=tmp_path).target_kl == 0.1
