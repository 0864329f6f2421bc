"""What is known of a model on a kind of device, in a type: kept beside it, checked when read."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from cache_store.errors import IntegrityError
from engine.calibration.curve import Curve
from engine.calibration.outcome import Gate, GateCheck
from engine.calibration.speed import Speed
from engine.context import ContextKind
from engine.files import replace_file
from engine.task import Task

SCHEMA = 1
FOLDER = "calibration"  # below the model's; a model that is copied leaves it behind
LARGEST = 4 * 2**20  # bytes of a profile that is worth reading


@dataclass(frozen=True)
class Subject:
    """What a profile is of. model: the fingerprint; dtype: `Blueprint.precision`; device: cpu,
    cuda or mps."""

    model: str
    dtype: str
    device: str

    @property
    def file(self) -> str:
        return f"{self.dtype}-{self.device}.json"


@dataclass(frozen=True)
class TaskProfile:
    """Quality over ratio for one kind of task, of chunks computed behind one kind of context.

    policy, ratio: what reaches target_kl. material: what it was measured with, prompts: how many,
    tokens: their mean length; date: ISO, in UTC.
    """

    task: Task
    context: ContextKind
    policy: str
    ratio: Decimal
    target_kl: float
    curves: tuple[Curve, ...]
    material: str
    prompts: int
    tokens: float
    date: str

    def curve(self, policy: str) -> Curve | None:
        """That of a policy, None where it wasn't measured."""
        return next((curve for curve in self.curves if curve.policy == policy), None)


@dataclass(frozen=True)
class Profile:
    """gate: None before it was run; speed: None before it was measured; version: of cacheblend,
    date: ISO, in UTC, of the last change."""

    subject: Subject
    version: str
    date: str
    gate: Gate | None = None
    speed: Speed | None = None
    tasks: tuple[TaskProfile, ...] = ()

    def of(self, task: str, context: str) -> TaskProfile | None:
        return next((t for t in self.tasks if (t.task, t.context) == (task, context)), None)

    def with_task(self, task: TaskProfile) -> "Profile":
        """With this one in the place of what was there for the task and context."""
        others = [t for t in self.tasks if (t.task, t.context) != (task.task, task.context)]
        return replace(self, tasks=(*others, task))

    def to_json(self) -> dict[str, Any]:
        """Schema 1: plain values, unrounded."""
        gate = None if self.gate is None else [check.to_json() for check in self.gate.checks]
        return {
            "schema": SCHEMA,
            **asdict(self),
            "gate": None if gate is None else {"passed": self.passed, "checks": gate},
            "tasks": [asdict(task) | {"ratio": str(task.ratio)} for task in self.tasks],
        }

    @property
    def passed(self) -> bool | None:
        """Whether the gate was; None where it wasn't run."""
        return None if self.gate is None else self.gate.passed

    @classmethod
    def from_json(cls, value: Any) -> "Profile":
        """Raises ValueError, saying what is wrong, for what isn't a profile of this schema."""
        try:
            if value["schema"] != SCHEMA:
                raise ValueError(f"schema {value['schema']!r}, not {SCHEMA}")
            return cls(
                Subject(**value["subject"]),
                str(value["version"]),
                str(value["date"]),
                None if value["gate"] is None else _gate(value["gate"]),
                None if value["speed"] is None else Speed.from_json(value["speed"]),
                tuple(_task(task) for task in value["tasks"]),
            )
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def read_profile(subject: Subject, places: Iterable[Path]) -> Profile | None:
    """The newest profile of the subject in folders of models or of profiles (see `places_of`).

    Raises IntegrityError, naming the file, for a damaged one where there is no good one. One of
    another model that was here before is none.
    """
    found: list[Profile] = []
    damage: IntegrityError | None = None
    for place in places:
        file = place / subject.file
        try:
            profile = _read(file)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            damage = IntegrityError(
                f"the calibration in {file} is damaged and was left out, so that whether the model "
                f"passed its gate isn't known ({error})",
                "`cacheblend calibrate` makes it anew",
            )
            continue
        if profile.subject == subject:
            found.append(profile)
    if not found and damage is not None:
        raise damage
    return max(found, key=lambda profile: profile.date, default=None)


def write_profile(profile: Profile, places: Iterable[Path]) -> Path:
    """Puts a profile into the first place that takes it, whole or not at all; returns the file.

    Raises OSError where none does.
    """
    data = json.dumps(profile.to_json(), indent=1, allow_nan=False) + "\n"
    refused: OSError | None = None
    for place in places:
        file = place / profile.subject.file
        try:
            replace_file(file, data, synced=True)
            return file
        except OSError as error:
            refused = error
    raise refused or FileNotFoundError("no folder to keep a calibration in")


def places_of(model: Path, fingerprint: str, data: Path) -> tuple[Path, Path]:
    """Where a model's profiles are: below its folder or, where that can't be written, below the
    folder of the user's data."""
    return model / FOLDER, data / FOLDER / fingerprint[:32]


def _read(file: Path) -> Profile:
    with file.open("rb") as opened:
        data = opened.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ValueError("too long")
    return Profile.from_json(json.loads(data, parse_constant=_refuse))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _gate(value: dict[str, Any]) -> Gate:
    gate = Gate.of(GateCheck.from_json(check) for check in value["checks"])
    if not gate.checks or gate.passed != value["passed"]:
        raise ValueError("the gate contradicts its checks")
    return gate


def _task(value: dict[str, Any]) -> TaskProfile:
    task = TaskProfile(
        **{
            **value,
            "ratio": Decimal(value["ratio"]),
            "curves": tuple(Curve.from_json(curve) for curve in value["curves"]),
        }
    )
    for curve in task.curves:
        ratios = [point.ratio for point in curve.points]
        fitted = [point.fitted for point in curve.points]
        if ratios != sorted(set(ratios)) or fitted != sorted(fitted, reverse=True):
            raise ValueError(f"the curve of {curve.policy} doesn't fall")
        if len(ratios) < 2 or not all(math.isfinite(kl) and kl >= 0 for kl in fitted):
            raise ValueError(f"the curve of {curve.policy} has no KL")
    if task.curve(task.policy) is None or not 0 <= task.ratio <= 1:
        raise ValueError(f"its policy {task.policy} has no curve")
    return task
