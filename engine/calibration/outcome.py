"""What the gate says: a check's outcome, and that of all of them."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GateCheck:
    """One check. value is measured; limit: the most it may be, or the least with `at_least`;
    said: one line on what was looked at, or why nothing could be."""

    name: str
    value: float
    limit: float
    said: str
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """What isn't a number passes nothing."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        value = self.value if math.isfinite(self.value) else None
        return asdict(self) | {"value": value, "passed": self.passed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "GateCheck":
        """Raises KeyError or TypeError for what isn't one."""
        measured = math.nan if value["value"] is None else float(value["value"])
        name, limit, said = str(value["name"]), float(value["limit"]), str(value["said"])
        return cls(name, measured, limit, said, bool(value["at_least"]))


@dataclass(frozen=True)
class Gate:
    """All checks of a model on a device, in a type."""

    checks: tuple[GateCheck, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def why(self) -> str:
        """The checks that failed, with what they measured; "" where none did."""
        return "; ".join(
            f"{c.name} is {c.value:.3g}, {'at least' if c.at_least else 'at most'} {c.limit:.3g}"
            for c in self.checks
            if not c.passed
        )

    @classmethod
    def of(cls, checks: Iterable[GateCheck]) -> "Gate":
        return cls(tuple(checks))
