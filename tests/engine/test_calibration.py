"""Curves, profiles, the controller and the plain way, without the real model."""

import json
import subprocess
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from cache_store.catalog import ChunkInfo
from cache_store.errors import IntegrityError, UsageError
from engine.calibration.bandwidth import Bandwidth
from engine.calibration.controller import Controller, Prompt, device_table, enough_bandwidth
from engine.calibration.curve import Curve, Point, best, falling
from engine.calibration.facts import order_for
from engine.calibration.outcome import Gate, GateCheck
from engine.calibration.profile import (
    Profile,
    Subject,
    TaskProfile,
    places_of,
    read_profile,
    write_profile,
)
from engine.calibration.prompts import TOGETHER, built_in, of_chunks
from engine.calibration.speed import Speed
from engine.calibration.straight import LayersKV, Straight
from engine.calibration.texts import PASSAGES, QUESTIONS
from engine.prefill import Prefilled
from engine.task import check_task
from engine.throttle import ThrottledStore
from tests.engine.blend_world import make_world
from tests.engine.tiny_models import TINY

BY_NAME = {tiny.name: tiny for tiny in TINY}
SPEED = Speed("cpu: here", 2, ((512, 5000.0),), 1e-4, 1e-6, 0.0, 1000, 4e9, 1e9)


def curve(
    policy: str,
    *kls: float,
    ratios: tuple[float, ...] = (0, 0.1, 0.2, 1),
    speedups: tuple[float, ...] = (2.0,) * 4,
) -> Curve:
    points = zip(ratios, kls, speedups, falling(kls), strict=True)
    return Curve(policy, (1,), tuple(Point(r, k, k, k, 0.5, 0.9, s, f) for r, k, s, f in points))


FALLS = curve("value", 0.1, 0.05, 0.03, 0.0)


# Curves


def test_falling_pools_what_rises_and_keeps_the_rest() -> None:
    assert falling([5, 3, 4, 1, 1, 2]) == [5, 3.5, 3.5, 4 / 3, 4 / 3, 4 / 3]
    assert falling([3, 2, 1]) == [3, 2, 1]
    assert falling([1, 2, 3]) == [2, 2, 2]
    assert falling([]) == []


@pytest.mark.parametrize(
    ("target", "ratio"),
    [
        (0.2, "0"),  # reuse is good enough
        (0.1, "0"),
        (0.05, "0.10"),
        (0.04, "0.15"),
        (0.0399, "0.16"),  # never a hundredth too little
        (0.03, "0.20"),
        (1e-9, "1.00"),
    ],
)
def test_the_smallest_ratio_whose_kl_is_at_most_the_target(target: float, ratio: str) -> None:
    found = FALLS.ratio_for(target)
    assert found == Decimal(ratio)
    assert FALLS.kl_at(found) <= target + 1e-12


def test_a_curve_that_rises_is_looked_up_as_if_it_stayed() -> None:
    noisy = curve("key", 0.1, 0.03, 0.05, 0.0)
    assert [point.kl for point in noisy.points] == [0.1, 0.03, 0.05, 0.0]  # raw ones are kept
    assert noisy.kl_at(Decimal("0.1")) == noisy.kl_at(Decimal("0.2")) == pytest.approx(0.04)
    assert noisy.ratio_for(0.03) > Decimal("0.2")


def test_the_best_policy_has_the_smallest_ratio_and_is_never_random() -> None:
    good, bad = curve("question", 0.1, 0.02, 0.01, 0), curve("value", 0.1, 0.05, 0.02, 0)
    lucky = curve("random", 0.1, 0.001, 0.0, 0)
    assert best([bad, lucky, good], 0.02, "value").policy == "question"
    same = replace(bad, policy="key")
    assert best([bad, same], 0.02, "key").policy == "key"  # the setting's, where they are equal
    assert best([lucky], 0.02, "value").policy == "random"  # but where there is no other


def test_of_equal_quality_the_fastest_policy_is_best() -> None:
    few = curve("question", 0.1, 0.02, 0.01, 0, speedups=(4.0, 2.0, 1.5, 1.0))
    many = curve("value", 0.1, 0.05, 0.02, 0, speedups=(4.0, 3.5, 3.0, 1.0))
    lucky = curve("random", 0.1, 0.001, 0, 0, speedups=(9.0, 9.0, 9.0, 9.0))
    assert few.ratio_for(0.02) < many.ratio_for(0.02)
    for found in ([few, many, lucky], [lucky, many, few]):
        assert best(found, 0.02, "question").policy == "value"
    # Two runs of the same measurement differ by some percent: that decides nothing.
    for slower in (2.0, 1.95, 2.05):
        alike = curve("value", 0.1, 0.05, 0.02, 0, speedups=(4.0, 3.0, slower, 1.0))
        assert best([alike, few], 0.02, "value").policy == "question"
    for unknown in (0.0, float("nan"), float("inf")):
        speeds = curve("value", 0.1, 0.05, 0.02, 0, speedups=(4.0, unknown, 3.0, 1.0))
        assert best([speeds, few], 0.02, "value").policy == "question"


def test_times_lie_on_a_straight_line_between_ratios() -> None:
    found = curve("value", 0.1, 0.05, 0.02, 0, speedups=(8.0, 4.0, 2.0, 1.0))
    assert found.speedup_at(Decimal("0.1")) == pytest.approx(4)
    assert found.speedup_at(Decimal("0.05")) == pytest.approx(1 / ((1 / 8 + 1 / 4) / 2))
    assert found.speedup_at(Decimal(1)) == pytest.approx(1)


# Profiles


@pytest.fixture
def profile() -> Profile:
    gate = Gate.of([GateCheck("one", 0.1, 0.2, "said"), GateCheck("two", 5, 3, "more", True)])
    task = TaskProfile(
        task="qa",
        context="prefix",
        policy="value",
        ratio=Decimal("0.16"),
        target_kl=0.04,
        curves=(FALLS, curve("random", 0.1, 0.08, 0.07, 0)),
        material="built-in texts",
        prompts=20,
        tokens=512.5,
        date="2026-01-02T03:04:05+00:00",
    )
    subject = Subject("a" * 64, "bf16", "cpu")
    return Profile(subject, "0.1", "2026-01-02T03:04:05+00:00", gate, SPEED, (task,))


def test_a_profile_reads_as_it_was_written(profile: Profile, tmp_path: Path) -> None:
    file = write_profile(profile, [tmp_path / "calibration"])
    assert read_profile(profile.subject, [file.parent]) == profile
    assert [path.name for path in file.parent.iterdir()] == ["bf16-cpu.json"]
    other = replace(profile.subject, model="b" * 64)
    assert read_profile(other, [file.parent]) is None  # another model was here before
    assert read_profile(replace(other, dtype="fp32"), [file.parent]) is None


def test_a_task_replaces_its_own_profile_alone(profile: Profile) -> None:
    summary = replace(profile.tasks[0], task="summary", ratio=Decimal("0.1"))
    both = profile.with_task(summary)
    again = both.with_task(replace(summary, ratio=Decimal("0.2")))
    assert len(both.tasks) == len(again.tasks) == 2
    assert again.of("qa", "prefix") == profile.tasks[0]
    found = again.of("summary", "prefix")
    assert found is not None
    assert found.ratio == Decimal("0.2")
    assert again.of("qa", "bos") is None


def damage(text: str, how: str) -> str:
    value = json.loads(text)
    match how:
        case "cut":
            return text[: len(text) // 2]
        case "no object":
            return "[]"
        case "schema":
            value["schema"] = 99
        case "rises":
            value["tasks"][0]["curves"][0]["points"][1]["fitted"] = 7.0
        case "negative":
            value["tasks"][0]["curves"][0]["points"][-1]["fitted"] = -1.0
        case "no number":
            return text.replace("0.05", "NaN", 1)
        case "gate":
            value["gate"]["passed"] = not value["gate"]["passed"]
        case "ratio":
            value["tasks"][0]["ratio"] = "7"
        case "policy":
            value["tasks"][0]["policy"] = "nobody's"
        case "missing":
            del value["tasks"][0]["curves"]
        case "speed":
            value["speed"]["token_layer_bytes"] = 0
    return json.dumps(value)


@pytest.mark.parametrize(
    "how",
    "cut,no object,schema,rises,negative,no number,gate,ratio,policy,missing,speed".split(","),
)
def test_a_damaged_profile_is_named(profile: Profile, tmp_path: Path, how: str) -> None:
    file = write_profile(profile, [tmp_path])
    file.write_text(damage(file.read_text(), how))
    with pytest.raises(IntegrityError, match=r"bf16-cpu\.json is damaged"):
        read_profile(profile.subject, [tmp_path])


def test_the_newest_good_one_of_two_places_counts(profile: Profile, tmp_path: Path) -> None:
    model, data = places_of(tmp_path / "model", profile.subject.model, tmp_path / "data")
    write_profile(profile, [model])
    later = replace(profile, date="2026-05-05T00:00:00+00:00", version="0.2")
    file = write_profile(later, [data])
    assert read_profile(profile.subject, [model, data]) == later
    file.write_text("{")
    assert read_profile(profile.subject, [model, data]) == profile


def test_a_folder_that_takes_nothing_is_passed_over(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    file = write_profile(profile, [tmp_path / "file" / "calibration", tmp_path / "data"])
    assert file == tmp_path / "data" / "bf16-cpu.json"
    with pytest.raises(OSError, match="file"):
        write_profile(profile, [tmp_path / "file" / "calibration"])


def test_a_write_that_breaks_leaves_what_was_there(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(profile, [tmp_path])

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_profile(replace(profile, version="2"), [tmp_path])
    assert read_profile(profile.subject, [tmp_path]) == profile
    assert len(list(tmp_path.iterdir())) == 1


# The controller

PROMPT = Prompt(tokens=1100, cached=1000, loaded=1050)


def test_the_largest_ratio_that_hides_behind_loading() -> None:
    controller = Controller(SPEED, FALLS, 0.05)  # calibrated: 0.1
    # A layer's KV is 1.05 MB; recomputing takes 0.15 ms and 1 ms for all cached tokens.
    slow, middle, fast = (controller.ratio(PROMPT, rate) for rate in (1e8, 3e9, 1e11))
    assert slow == 1
    assert middle == Decimal("0.20")
    assert fast == Decimal("0.10")
    assert controller.ratio(PROMPT, None) == Decimal("0.10")
    computed = PROMPT.always + middle * PROMPT.cached
    load = SPEED.load_s(PROMPT.loaded, 3e9)
    assert SPEED.recompute_s(float(computed), 1100) <= load
    assert SPEED.recompute_s(float(computed) + 10, 1100) > load


def test_nothing_hides_behind_what_is_kept() -> None:
    """Of a conversation, what is in the KV cache is neither loaded nor computed."""
    controller = Controller(SPEED, FALLS, 0.05)
    later = Prompt(tokens=2100, cached=100, loaded=100, kept=1950)
    assert later.always == PROMPT.always
    assert controller.ratio(later, 3e9) < controller.ratio(PROMPT, 3e9)


def test_nothing_hides_where_all_is_loaded_first() -> None:
    controller = Controller(SPEED, FALLS, 0.05, loads_first=True)
    assert [controller.ratio(PROMPT, rate) for rate in (1e8, 1e11)] == [Decimal("0.10")] * 2
    assert controller.ratio(PROMPT, 1e8, observed_kl=0.1) > Decimal("0.10")


def test_quality_that_is_off_target_raises_the_minimum() -> None:
    controller = Controller(SPEED, FALLS, 0.05)
    assert controller.minimum(0.01) == controller.minimum(0.05) == Decimal("0.10")
    a_little, much = controller.minimum(0.051), controller.minimum(0.1)
    assert Decimal("0.15") <= a_little < much < 1
    assert controller.minimum(100.0) <= 1
    assert controller.ratio(PROMPT, 1e11, observed_kl=0.1) == much


def test_the_device_table_says_what_is_fast_enough() -> None:
    ratios = [Decimal("0.1"), Decimal("0.5")]
    enough = [enough_bandwidth(SPEED, PROMPT, ratio) for ratio in ratios]
    assert enough[0] > enough[1]  # more recomputing hides slower storage
    for ratio, rate in zip(ratios, enough, strict=True):
        cells = device_table(SPEED, PROMPT, [ratio], [("less", rate / 1.01), ("more", rate * 1.01)])
        assert [cell.hidden for cell in cells] == [False, True]


def test_with_a_store_that_is_slow_the_ratio_rises(tmp_path: Path) -> None:
    world = make_world(BY_NAME["llama"], tmp_path)
    world.ingest()
    c = world.model.config
    layer_bytes = 2 * c.kv_heads * c.head_dim * 4
    # A layer takes 5 ms and 0.2 ms a token: it hides behind loading below about 1 MB/s only.
    speed = replace(SPEED, fixed_s=5e-3, token_s=2e-4, token_layer_bytes=layer_bytes)
    controller = Controller(speed, FALLS, 0.05)
    prompt = world.prompt((2, 0, 1))
    cached = sum(len(s.token_ids) for s in prompt.segments if s.kind == "chunk")
    tokens = Prompt(len(prompt.token_ids), cached, cached + len(prompt.prefix_ids))

    def chosen(run: Prefilled) -> Decimal:
        seconds = sum(layer.load_s for layer in run.watch.layers)
        return controller.ratio(tokens, run.bytes_loaded / seconds)

    fast = world.prefill(prompt, ratio=0)
    world.store = ThrottledStore(world.store, 200_000)  # type: ignore[assignment]
    slow = world.prefill(prompt, ratio=0)
    assert torch.equal(fast.logits, slow.logits)
    assert chosen(slow) > chosen(fast) == controller.minimum()


def test_bandwidth_is_remembered_for_each_store(tmp_path: Path) -> None:
    file = tmp_path / "home" / "bandwidth.json"
    one, other = Bandwidth(file, Path("/one")), Bandwidth(file, Path("/other"))
    assert one.latest() is None
    one.saw(10**9, 1.0)
    one.saw(100, 1.0)  # too little to say anything
    other.saw(10**7, 1.0)
    assert one.latest() == 1e9
    one.saw(3 * 10**9, 1.0)
    assert one.latest() == 2e9  # half of what was, half of what is
    assert other.latest() == 1e7
    file.write_text("[1")
    assert one.latest() is None
    one.saw(10**9, 1.0)
    assert one.latest() == 1e9


# The plain way


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-linear", "llama-dynamic-past", "llama-yarn", "mistral-window"),
        *("qwen3-bias", "smollm3-window", "phi3-partial-window"),
        *(name for name in BY_NAME if name.startswith("gemma")),
    ],
)
def test_the_plain_way_is_transformers_own(name: str, tmp_path: Path) -> None:
    world = make_world(BY_NAME[name], tmp_path)
    prompt = world.prompt((2, 0, 3))
    run = Straight(world.model)(prompt.token_ids)
    assert float((run.logits[-1] - world.full(prompt)).abs().max()) <= 1e-4


def test_the_plain_way_of_a_blend(tmp_path: Path) -> None:
    """Stored KV where nothing is computed; all of it computed is a full prefill."""
    world = make_world(BY_NAME["llama"], tmp_path)
    prompt = world.prompt((1, 0))
    straight, total = Straight(world.model), len(prompt.token_ids)
    full = straight(prompt.token_ids)
    last = [[total - 1]] * world.model.config.layers
    same = straight(prompt.token_ids, computed=last, stored=full.kv)
    assert float((same.logits - full.logits).abs().max()) <= 1e-4
    nothing = LayersKV(torch.zeros_like(full.kv.k), torch.zeros_like(full.kv.v))
    other = straight(prompt.token_ids, computed=last, stored=nothing)
    assert float((other.logits - full.logits).abs().max()) > 0.1


# Prompts


def test_every_answer_is_in_the_passages_that_hold_it_and_in_no_other_of_its_prompt() -> None:
    for question in QUESTIONS:
        order = order_for(question)
        holding = {n for n in order if question.answer in PASSAGES[n].chunk}
        assert holding & set(question.needs), question.text
        assert holding <= set(question.needs), question.text
        assert len(order) == len(set(order)) == len(question.needs) + 3
        assert set(question.needs) <= set(order)


@pytest.mark.parametrize("task", ["qa", "summary"])
def test_built_in_prompts(task) -> None:
    prompts = built_in(task, 100)
    assert len(prompts) == len(PASSAGES) == 24
    assert built_in(task, 5) == prompts[:5]
    assert len({(q.text, q.passages) for q in prompts}) == 24


def stored(text: str, source: str, tokens: int) -> ChunkInfo:
    return ChunkInfo(source, text, tokens, source, 0, 0, len(text))


def test_prompts_of_stored_chunks_ask_for_what_one_of_them_has() -> None:
    texts = [
        stored(f"The common word and the rareword{chr(97 + n)} here.", f"{n}.md", 10)
        for n in range(9)
    ]
    prompts = of_chunks("qa", texts, 6, 2000)
    assert prompts == of_chunks("qa", texts, 6, 2000)
    assert len(prompts) == 6
    for prompt in prompts:
        assert len(prompt.passages) == TOGETHER
        assert sum(f"rareword{letter}" in prompt.text for letter in "abcdefghi") == 1
        assert any(p.text.split()[5] in prompt.text for p in prompt.passages)
    assert all("rareword" not in q.text for q in of_chunks("summary", texts, 6, 2000))
    assert of_chunks("qa", texts[:7], 6, 2000) == ()  # too few to say anything
    with pytest.raises(UsageError, match="unknown"):
        check_task("poem")


def test_prompts_of_stored_chunks_keep_to_their_tokens() -> None:
    """However many characters a token has, and whichever chunk is drawn first."""
    texts = [stored(f"word{n} " + "漢字" * 20, f"{n}.md", 100) for n in range(8)]
    assert {len(q.passages) for q in of_chunks("summary", texts, 6, 250)} == {2}
    assert {len(q.passages) for q in of_chunks("summary", texts, 6, 100)} == {1}
    assert of_chunks("summary", texts, 6, 99) == ()
    long = [*texts[:4], *(stored(f"long{n}", f"l{n}.md", 1000) for n in range(4))]
    found = of_chunks("summary", long, 20, 400)
    assert found
    assert all("long" not in p.text for q in found for p in q.passages)


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("engine.calibration.profile", ("prompts", "texts", "ground", "gate", "measure")),
        ("cbcli.settings", ("",)),
    ],
)
def test_the_name_of_a_task_takes_no_prompts(module: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {module, "engine.task"} <= {*found}
    assert not {f"engine.calibration.{name}".rstrip(".") for name in unwanted} & {*found}
    assert module != "cbcli.settings" or "torch" not in found
