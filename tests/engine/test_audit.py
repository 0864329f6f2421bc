"""Audits: when, of what, what is logged, and that none costs an answer."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache_store.errors import CacheblendError, UsageError
from cache_store.journal import Journal
from cache_store.store import ChunkStore
from engine import api
from engine.api import Engine
from engine.audit import (
    LAST,
    Audit,
    AuditLog,
    AuditRecord,
    audit_groups,
    prompt_hash,
    running_kl,
)
from engine.options import BlendOptions, SamplingOptions
from engine.results import AskResult
from tests.engine.test_template import CHATML
from tests.engine.tiny_models import Tiny, build
from tests.engine.tiny_tokenizers import write_tokenizer

TEXTS = ("The tide turns twice a day.", "The pilot boat leaves at six.", "The lamp burns oil.")
RECORD = AuditRecord(
    *(1.0, "p" * 32, "m" * 64, "bf16", "blend", "value", (0.16,), None),
    *(100, 80, 13, 0.1, 0.2, 0.9, False, "qa"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    build(Tiny("tiny", "Llama", {"vocab_size": 1000, "max_position_embeddings": 2048}), folder)
    return Engine.load(write_tokenizer(folder, chat_template=CHATML), device="cpu", dtype="fp32")


@pytest.fixture
def engine(model: Engine, tmp_path: Path) -> Iterator[Engine]:
    with ChunkStore.open(tmp_path / "store", limit_bytes=10**9) as store:
        engine = Engine(model.model, model.blueprint, store=store)
        engine.precompute([engine.chunk(text) for text in TEXTS])
        yield engine


def log_of(engine: Engine) -> AuditLog:
    assert isinstance(engine.store, ChunkStore)
    return AuditLog(engine.store.journal)


def ask(engine: Engine, audit: Audit | None, texts: Sequence[str] = TEXTS[::-1], **options: Any):
    named = {name: options.pop(name) for name in ("compare", "save") if name in options}
    blend = BlendOptions.of(**{"min_tokens": 0, "ratio": "0.3", **options})
    chunks = [engine.chunk(text) for text in texts]
    sampling = SamplingOptions(max_tokens=4)
    return engine.ask("When?", chunks, blend=blend, sampling=sampling, audit=audit, **named)


def plain(result: AskResult) -> dict[str, Any]:
    """What does not depend on time, or on being audited."""
    return {key: value for key, value in result.to_json().items() if key not in ("timing", "audit")}


def test_an_audit_is_what_a_comparison_finds(engine: Engine) -> None:
    audit = Audit(log_of(engine), every=1)
    compared = ask(engine, None, compare=True)
    audited = ask(engine, audit)
    both = ask(engine, audit, compare=True)
    assert compared.audit is None
    assert audited.compare is None
    assert compared.compare is not None
    wanted = compared.compare
    for result in (audited, both):
        assert result.audit is not None
        assert result.audit.kl_mean > 0
        found = (result.audit.kl_first, result.audit.kl_mean, result.audit.top1_agreement)
        assert found == (wanted.kl_first, wanted.kl_mean, wanted.top1_agreement)
        assert result.to_json()["audit"]["kl_mean"] == wanted.kl_mean
    assert plain(audited) == plain(replace(compared, compare=None))
    assert plain(replace(both, compare=None)) == plain(replace(compared, compare=None))


def test_a_comparison_is_not_made_twice(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    reference = api.reference

    def counting(*args: Any, **named: Any) -> Any:
        counted.append(1)
        return reference(*args, **named)

    monkeypatch.setattr(api, "reference", counting)
    ask(engine, Audit(log_of(engine), every=1), compare=True)
    assert counted == [1]
    ask(engine, Audit(log_of(engine), every=1))
    assert counted == [1, 1]


def test_the_log_has_numbers_and_no_text(engine: Engine) -> None:
    result = ask(engine, Audit(log_of(engine), every=1))
    assert isinstance(engine.store, ChunkStore)
    (record,), damaged = log_of(engine).records()
    assert damaged == 0
    assert result.audit is not None
    assert record == AuditRecord(
        time=record.time,
        prompt=prompt_hash(result.prompt.token_ids),
        model=engine.spec.model,
        dtype="fp32",
        mode="blend",
        policy=result.policy,
        ratios=(0.3,),
        threshold=None,
        tokens=len(result.prompt.token_ids),
        cached_tokens=sum(s.end - s.start for s in result.prompt.segments if s.kind == "chunk"),
        recomputed=result.recomputed.tokens,
        kl_first=result.audit.kl_first,
        kl_mean=result.audit.kl_mean,
        top1_agreement=result.audit.top1_agreement,
        transfer=True,
        task="qa",
    )
    written = (engine.store.path / "audit" / "log.jsonl").read_text()
    assert not any(word in written for word in ("tide", "When", "boat", result.answer or "\0"))


def test_one_in_n_over_all_that_ask(engine: Engine) -> None:
    audited = [ask(engine, Audit(log_of(engine), every=3)).audit is not None for _ in range(7)]
    assert audited == [True, False, False, True, False, False, True]
    numbered = [ask(engine, Audit(log_of(engine), 2, number)).audit for number in (4, 5, 6)]
    assert [found is not None for found in numbered] == [True, False, True]
    assert len(log_of(engine).records()[0]) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "full"},
        {"mode": "prefix"},
        {"min_tokens": 10_000},
        {"ratio": "1"},
        {"texts": ("Something new.",), "save": False},
        {"texts": ()},
    ],
    ids=str,
)
def test_what_is_a_full_prefill_is_neither_audited_nor_counted(
    engine: Engine, options: dict[str, Any]
) -> None:
    assert ask(engine, Audit(log_of(engine), every=1), **options).audit is None
    assert log_of(engine).next_number() == 0
    assert log_of(engine).records() == ([], 0)


def test_reuse_is_audited(engine: Engine) -> None:
    result = ask(engine, Audit(log_of(engine), every=1), mode="reuse")
    assert result.audit is not None
    (record,), _ = log_of(engine).records()
    assert (record.mode, record.policy, record.ratios, record.recomputed) == ("reuse", "", (), 0)


def test_a_failing_audit_loses_no_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ask(engine, None)

    def full(record: object) -> None:
        raise CacheblendError("no space left on the disk")

    log = log_of(engine)
    monkeypatch.setattr(log, "append", full)
    result = ask(engine, Audit(log, every=1))
    assert plain(result) == plain(wanted)
    assert result.audit is None
    assert result.notes == ("the prompt was not audited: no space left on the disk",)

    def no_memory(*args: Any) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(api, "reference", no_memory)
    result = ask(engine, Audit(log, every=1))
    assert plain(result) == plain(wanted)
    assert result.notes == ("the prompt was not audited: not enough memory",)


def test_a_read_only_store_is_said_before_any_work(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(engine.store, ChunkStore)
    monkeypatch.setattr(api, "reference", lambda *args: pytest.fail("a full prefill"))
    log = AuditLog(Journal(engine.store.path, read_only=True))
    for number in (None, 0):
        result = ask(engine, Audit(log, 1, number))
        assert result.audit is None
        (note,) = result.notes
        assert "not audited" in note
        assert "open for reading only" in note


def test_one_in_0_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="one in 0"):
        Audit(log_of(engine), every=0)


# The log


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, read_only=False)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 3},
        {"transfer": None},
        {"transfer": 1},
        {"task": True},
        {"kl_mean": None},
        {"kl_mean": "0.1"},
        {"kl_mean": True},
        {"time": []},
        {"tokens": -1},
        {"tokens": 1.5},
        {"recomputed": True},
        {"model": 7},
        {"ratios": 0.16},
        {"ratios": ["0.16"]},
    ],
    ids=str,
)
def test_lines_of_something_else_are_damaged(journal: Journal, change: dict[str, Any]) -> None:
    log = AuditLog(journal)
    log.append(RECORD)
    (line,) = journal.read().records
    journal.append({**line, **change})
    journal.append({key: value for key, value in line.items() if key not in change})
    log.append(replace(RECORD, time=2.0))
    good, damaged = log.records()
    assert good == [RECORD, replace(RECORD, time=2.0)]
    assert damaged == 2


def test_infinities_are_damage_too(journal: Journal, tmp_path: Path) -> None:
    AuditLog(journal).append(RECORD)
    path = tmp_path / "audit" / "log.jsonl"
    text = path.read_text()
    path.write_text(text + text.replace("0.2", "Infinity") + text.replace("0.2", "NaN"))
    assert AuditLog(journal).records() == ([RECORD], 2)


def some(count: int, kl: float, **fields: Any) -> list[AuditRecord]:
    made = [replace(RECORD, kl_mean=kl, **fields) for _ in range(count)]
    return [replace(record, time=float(number)) for number, record in enumerate(made)]


def test_groups_and_their_running_means(journal: Journal) -> None:
    records = [
        *some(30, 5.0),
        *some(LAST - 1, 0.1),
        *some(1, 0.2, top1_agreement=0.0, prompt="w" * 32),
        *some(3, 0.4, ratios=(0.05,)),
        *some(2, 0.6, mode="reuse", policy="", ratios=()),
        *some(1, 0.7, model="n" * 64),
    ]
    groups = {(g.model[0], g.mode, g.policy, g.ratios): g for g in audit_groups(records)}
    assert len(groups) == 4
    usual = groups["m", "blend", "value", (0.16,)]
    assert usual.audited == LAST + 30
    assert usual.kl_mean == pytest.approx((0.1 * (LAST - 1) + 0.2) / LAST)
    assert usual.top1_agreement == pytest.approx(0.9 * (LAST - 1) / LAST)
    assert (usual.kl_worst, usual.worst) == (5.0, RECORD.prompt)
    assert groups["m", "reuse", "", ()].kl_mean == pytest.approx(0.6)
    assert [g.last_at for g in audit_groups(records)] == sorted(
        (g.last_at for g in groups.values()), reverse=True
    )
    log = AuditLog(journal)
    assert running_kl(log, "m" * 64, "value") is None
    for record in records:
        log.append(record)
    mixed = (0.1 * (LAST - 4) + 0.2 + 3 * 0.4) / LAST
    assert running_kl(log, "m" * 64, "value") == pytest.approx(mixed)
    assert running_kl(log, "m" * 64, "value", last=2) == pytest.approx(0.4)
    assert running_kl(log, "n" * 64, "value") == pytest.approx(0.7)
    assert running_kl(log, "m" * 64, "value", at_least=0.1) == pytest.approx(usual.kl_mean)
    assert running_kl(log, "m" * 64, "value", at_least=0.2) is None
    assert running_kl(log, "m" * 64, "key") is None
    assert running_kl(log, "m" * 64, "value", dtype="fp32") is None


def test_tasks_and_transfers_are_kept_apart(journal: Journal) -> None:
    records = [
        *some(2, 0.1),
        *some(3, 0.3, transfer=True),
        *some(4, 0.5, task="summary"),
        *some(1, 0.7, transfer=None, task=""),
    ]
    groups = {(g.task, g.transfer): (g.audited, g.kl_mean) for g in audit_groups(records)}
    assert groups == {
        ("qa", False): (2, pytest.approx(0.1)),
        ("qa", True): (3, pytest.approx(0.3)),
        ("summary", False): (4, pytest.approx(0.5)),
        ("", None): (1, pytest.approx(0.7)),
    }
    log = AuditLog(journal)
    for record in records[:-1]:
        log.append(record)

    def kl(**kept: Any) -> float | None:
        return running_kl(log, "m" * 64, "value", **kept)

    assert kl(transfer=True) == pytest.approx(0.3)
    assert kl(task="summary") == pytest.approx(0.5)
    assert kl(task="qa", transfer=False) == pytest.approx(0.1)
    assert kl(task="summary", transfer=True) is None


def test_records_of_earlier_versions_are_read(journal: Journal) -> None:
    """Of them, neither task nor transfer is known."""
    log = AuditLog(journal)
    log.append(RECORD)
    (line,) = journal.read().records
    later = ("task", "transfer")
    journal.append({**{k: v for k, v in line.items() if k not in later}, "v": 1, "time": 2.0})
    good, damaged = log.records()
    assert damaged == 0
    assert good == [RECORD, replace(RECORD, time=2.0, transfer=None, task="")]
    assert len(audit_groups(good)) == 2
    assert running_kl(log, "m" * 64, "value", task="qa", transfer=False) == RECORD.kl_mean
    assert running_kl(log, "m" * 64, "value") == RECORD.kl_mean
    assert running_kl(log, "m" * 64, "value", transfer=True) is None


def test_task_and_transfer_of_a_prompt_are_logged(engine: Engine) -> None:
    ask(engine, Audit(log_of(engine), 1, task="summary"))
    ask(engine, Audit(log_of(engine), 1), transfer=False)
    ask(engine, Audit(log_of(engine), 1), policy="value")
    ask(engine, Audit(log_of(engine), 1), mode="reuse")
    records, _ = log_of(engine).records()
    found = [(record.task, record.policy, record.transfer) for record in records]
    assert found == [
        *(("summary", "question", True), ("qa", "question", False)),
        *(("qa", "value", False), ("qa", "", False)),
    ]


def test_records_are_json_that_others_can_read(journal: Journal, tmp_path: Path) -> None:
    AuditLog(journal).append(RECORD)
    (line,) = (tmp_path / "audit" / "log.jsonl").read_text().splitlines()
    assert json.loads(line)["kl_mean"] == 0.2
    assert json.loads(line)["ratios"] == [0.16]
