"""The gate: may this model be blended, here and in this type?"""

from collections.abc import Iterator

from engine.calibration.facts import Facts
from engine.calibration.ground import Ground
from engine.calibration.identities import Identities
from engine.calibration.outcome import GateCheck
from engine.calibration.positions import Positions

CHECKS = 13  # how many there are, for showing how far it is


def gate_checks(where: Ground) -> Iterator[GateCheck]:
    """Each check's outcome as soon as it is known. Raises UsageError for a model whose context is
    too short for the built-in prompts."""
    yield from Identities(where)()
    yield from Positions(where.engine)()
    yield from Facts(where)()
