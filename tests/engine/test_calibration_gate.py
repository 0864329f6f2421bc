"""The gate on the real default model: it passes, and every fault that is put in fails it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.calibration.facts import Facts
from engine.calibration.ground import Ground, ground
from engine.calibration.identities import Identities
from engine.calibration.outcome import Gate, GateCheck
from engine.calibration.positions import Positions
from engine.config import load_config
from engine.rope import Rope, Tables

pytestmark = pytest.mark.model

SHORT = 1280  # tokens that a RoPE is judged by here; `calibrate` takes all there are


@pytest.fixture(scope="module")
def engine(default_model_dir: Path) -> Engine:
    return Engine.load(default_model_dir)


@pytest.fixture(scope="module")
def where(engine: Engine) -> Iterator[Ground]:
    with ground(engine) as found:
        yield found


@pytest.fixture(scope="module")
def identities(where: Ground) -> Identities:
    """One for all tests: its references are computed once, what is checked each time."""
    return Identities(where)


def test_a_good_model_passes(where: Ground, identities: Identities) -> None:
    checks = [*identities(), *Positions(where.engine, SHORT)(), *Facts(where, asked=4)()]
    assert Gate.of(checks).passed, Gate.of(checks).why
    assert len({check.name for check in checks}) == len(checks) == 13
    assert all(check.said for check in checks)


def shifted(tables: Tables, by: int) -> Tables:
    kinds = tuple((cos.roll(by, 0), sin.roll(by, 0)) for cos, sin in tables.kinds)
    return Tables(kinds, tables.kind_of)


@pytest.mark.parametrize("by", [1, -1])
def test_keys_turned_one_position_off_fail(
    identities: Identities, monkeypatch: pytest.MonkeyPatch, by: int
) -> None:
    model = identities.ground.engine.model
    place = model.store_runs
    monkeypatch.setattr(
        model, "store_runs", lambda layer, cache, runs, t: place(layer, cache, runs, shifted(t, by))
    )
    check = identities.placed()
    assert not check.passed
    assert check.value > 2 * check.limit  # and not by a hair


def test_another_theta_at_use_fails(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = identities.ground.engine.model
    place, config = model.store_runs, model.config
    wrong = Rope(with_theta(config, 0.1), model.device)
    monkeypatch.setattr(
        model,
        "store_runs",
        lambda layer, cache, runs, t: place(layer, cache, runs, wrong.tables(len(t.kinds[0][0]))),
    )
    assert not identities.placed().passed


def test_another_theta_everywhere_fails(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys agree with each other, but not with what is declared."""
    model = identities.ground.engine.model
    monkeypatch.setattr(model, "rope", Rope(with_theta(model.config, 0.1), model.device))
    assert not identities.full().passed


def with_theta(config, factor: float):
    from dataclasses import replace

    return replace(config, rope=replace(config.rope, theta=config.rope.theta * factor))


def test_a_mask_aligned_to_the_end_fails(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered tokens then see later keys, as if they were the last ones of the prompt."""
    model = identities.ground.engine.model
    attend = model.attend

    def leaking(layer, q, cache, plan):
        last = plan.bounds[-1] + 1
        return attend(layer, q, cache, model.plan(list(range(last - len(plan), last))))

    monkeypatch.setattr(model, "attend", leaking)
    check = identities.scattered()
    assert not check.passed
    assert check.value > 2 * check.limit


def test_a_stored_value_that_is_lost_loses_facts(
    where: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = where.engine.model
    place = model.store_runs

    def lossy(layer, cache, runs, tables):
        place(layer, cache, [(at, k, torch.zeros_like(v)) for at, k, v in runs], tables)

    monkeypatch.setattr(model, "store_runs", lossy)
    assert not next(Facts(where, asked=3)()).passed


@pytest.mark.parametrize(
    "declared",
    [
        {"rope_theta": 10_000.0},
        {"rope_theta": 1_000_000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},  # one that nobody trained with
        {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},  # as where a 2 was dropped
    ],
    ids=["theta-low", "theta-high", "factor-added", "factor-dropped"],
)
def test_a_rope_declared_wrongly_fails(
    default_model_dir: Path, tmp_path: Path, declared: dict[str, object]
) -> None:
    for file in default_model_dir.iterdir():
        if file.is_file() and file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((default_model_dir / "config.json").read_text())
    assert config["rope_theta"] == 100_000.0
    (tmp_path / "config.json").write_text(json.dumps(config | declared))
    assert load_config(tmp_path).rope != load_config(default_model_dir).rope
    check = Positions(Engine.load(tmp_path), SHORT).others()
    assert not check.passed
    assert check.value > 2 * check.limit


def test_what_is_no_number_passes_nothing() -> None:
    nothing = GateCheck("name", float("nan"), 1.0, "said")
    assert not nothing.passed
    assert not GateCheck("name", float("nan"), 0.0, "said", at_least=True).passed
    assert GateCheck.from_json(json.loads(json.dumps(nothing.to_json()))).passed is False
    assert Gate.of([nothing]).why == "name is nan, at most 1"
