"""Watching quality in use: one in N prompts again with full prefill, its divergence in a log.

The log is in the store's folder. It holds numbers and a hash of each prompt, never text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from blake3 import blake3

from cache_store.errors import UsageError
from cache_store.journal import Journal
from cache_store.keys import pack_ids
from engine.numbers import is_number
from engine.task import Task

if TYPE_CHECKING:
    from engine.options import BlendOptions
    from engine.prompt import Prompt
    from engine.results import Audited, ModelInfo

LAST = 100  # audited prompts that a running mean is over
_VERSION = 2
_EARLIER = 1  # without transfer and task


@dataclass(frozen=True)
class AuditRecord:
    """One audited prompt. time: seconds since the epoch; prompt: hash of its ids; model: its
    fingerprint; policy: empty for mode reuse; KL(full || blend) in nats, its mean and the share of
    equal top tokens teacher-forced along full prefill's greedy answer.

    transfer: whether tokens that weren't recomputed were moved; task: what the prompt asked for;
    None and empty in records of versions that kept neither."""

    time: float
    prompt: str
    model: str
    dtype: str
    mode: str
    policy: str
    ratios: tuple[float, ...]
    threshold: float | None
    tokens: int
    cached_tokens: int
    recomputed: int
    kl_first: float
    kl_mean: float
    top1_agreement: float
    transfer: bool | None
    task: str


@dataclass(frozen=True)
class AuditGroup:
    """What was audited of one model, type, task, mode, policy, transfer, and ratio or threshold.
    kl_mean, top1_agreement: of the last 100; kl_worst: the largest mean KL of a prompt, and `worst`
    that prompt's hash."""

    model: str
    dtype: str
    task: str
    mode: str
    policy: str
    transfer: bool | None
    ratios: tuple[float, ...]
    threshold: float | None
    audited: int
    kl_mean: float
    kl_worst: float
    worst: str
    top1_agreement: float
    last_at: float


class AuditLog:
    """The audited prompts of one store; see `Journal` for what it raises."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def append(self, record: AuditRecord) -> None:
        self._journal.append({"v": _VERSION, **asdict(record)})

    def next_number(self) -> int:
        """Counts prompts over all processes, from 0."""
        return self._journal.next_number()

    def require_writable(self) -> None:
        self._journal.require_writable()

    def records(self) -> tuple[list[AuditRecord], int]:
        """What is in the log, oldest first, and how many of its lines are damaged."""
        lines = self._journal.read()
        found = [_record(line) for line in lines.records]
        good = [record for record in found if record is not None]
        return good, lines.damaged + len(found) - len(good)


class Ran(Protocol):
    """Of a run, what is logged: see `engine.prefill.PrefillRun`."""

    @property
    def cached_tokens(self) -> int: ...

    @property
    def selected(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Audit:
    """Which prompts to audit: those whose number is a multiple of `every`.

    number: the prompt's place among those of its run, from 0; None: by the log's own count, over
    all processes. task: what the prompt asks for. Raises UsageError for an `every` below 1.
    """

    log: AuditLog
    every: int
    number: int | None = None
    task: Task = "qa"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise UsageError(f"one in {self.every} prompts cannot be audited", "give 1 or more")

    def is_due(self) -> bool:
        """Whether this prompt is to be audited; counts it. To be asked once a prompt.

        Raises UsageError where the store is open for reading only.
        """
        self.log.require_writable()
        number = self.log.next_number() if self.number is None else self.number
        return number % self.every == 0

    def record(
        self,
        model: ModelInfo,
        prompt: Prompt,
        run: Ran,
        options: BlendOptions,
        found: Audited,
    ) -> AuditRecord:
        """What is logged of a prompt that was audited just now."""
        blending = options.mode == "blend"
        return AuditRecord(
            time=time.time(),
            prompt=prompt_hash(prompt.token_ids),
            model=model.fingerprint,
            dtype=model.precision,
            mode=options.mode,
            policy=options.policy if blending else "",
            ratios=tuple(float(ratio) for ratio in options.ratios) if blending else (),
            threshold=None if options.threshold is None else float(options.threshold),
            tokens=len(prompt.token_ids),
            cached_tokens=run.cached_tokens,
            recomputed=len(run.selected),
            kl_first=found.kl_first,
            kl_mean=found.kl_mean,
            top1_agreement=found.top1_agreement,
            transfer=options.transfers,
            task=self.task,
        )


def prompt_hash(token_ids: Sequence[int]) -> str:
    """32 hex digits that name a prompt in the log."""
    return blake3(pack_ids(tuple(token_ids))).hexdigest()[:32]


def audit_groups(records: Iterable[AuditRecord]) -> list[AuditGroup]:
    """The records summed up, the group that was audited last first."""
    grouped: dict[tuple[Any, ...], list[AuditRecord]] = {}
    for r in records:
        key = (r.model, r.dtype, r.task, r.mode, r.policy, r.transfer, r.ratios, r.threshold)
        grouped.setdefault(key, []).append(r)
    groups = []
    for members in grouped.values():
        worst = max(members, key=lambda record: record.kl_mean)
        groups.append(
            AuditGroup(
                model=worst.model,
                dtype=worst.dtype,
                task=worst.task,
                mode=worst.mode,
                policy=worst.policy,
                transfer=worst.transfer,
                ratios=worst.ratios,
                threshold=worst.threshold,
                audited=len(members),
                kl_mean=fmean(r.kl_mean for r in members[-LAST:]),
                kl_worst=worst.kl_mean,
                worst=worst.prompt,
                top1_agreement=fmean(r.top1_agreement for r in members[-LAST:]),
                last_at=max(r.time for r in members),
            )
        )
    return sorted(groups, key=lambda group: group.last_at, reverse=True)


def running_kl(
    log: AuditLog,
    model: str,
    policy: str,
    *,
    at_least: float = 0.0,
    dtype: str | None = None,
    transfer: bool | None = None,
    task: str | None = None,
    last: int = LAST,
) -> float | None:
    """Mean KL of the last audited blends of a model (its fingerprint) with a policy, or None.

    at_least: of those alone that chose with no smaller ratio at the last check layer; dtype: of
    those in this type; transfer, task: of those with this one, which is known of them. A log that
    cannot be read raises as `AuditLog.records` does.
    """
    found = [
        r.kl_mean
        for r in log.records()[0]
        if (r.model, r.mode, r.policy) == (model, "blend", policy)
        and r.ratios
        and r.ratios[-1] >= at_least
        and (dtype is None or r.dtype == dtype)
        and (transfer is None or r.transfer == transfer)
        and (task is None or r.task == task)
    ]
    return fmean(found[-last:]) if found else None


def _record(line: Any) -> AuditRecord | None:
    """The record that a line holds; None for one that no version of `append` wrote."""
    transfer, task = line.get("transfer"), line.get("task")
    if line.get("v") == _EARLIER:
        transfer, task = None, ""
    elif line.get("v") != _VERSION or not (isinstance(transfer, bool) and isinstance(task, str)):
        return None
    texts = {name: line.get(name) for name in ("prompt", "model", "dtype", "mode", "policy")}
    counts = {name: line.get(name) for name in ("tokens", "cached_tokens", "recomputed")}
    numbers = {name: line.get(name) for name in ("time", "kl_first", "kl_mean", "top1_agreement")}
    ratios, threshold = line.get("ratios"), line.get("threshold")
    if not (
        all(isinstance(text, str) for text in texts.values())
        and all(type(count) is int and count >= 0 for count in counts.values())
        and isinstance(ratios, list)
        and all(is_number(number) for number in (*numbers.values(), *ratios))
        and (threshold is None or is_number(threshold))
    ):
        return None
    return AuditRecord(
        **texts,
        **counts,
        **numbers,
        ratios=tuple(map(float, ratios)),
        threshold=threshold,
        transfer=transfer,
        task=task,
    )
