"""The gate: may this model be blended, here and in this type?"""

from collections.abc import Iterator

from engine.api import Engine
from engine.calibration.facts import Facts
from engine.calibration.ground import ground
from engine.calibration.identities import Identities
from engine.calibration.outcome import Gate, GateCheck
from engine.calibration.positions import Positions

CHECKS = 13  # how many there are, for showing how far it is


def gate_checks(engine: Engine) -> Iterator[GateCheck]:
    """Each check's outcome as soon as it is known.

    Raises OSError where the system's folder for temporary files takes no store, UsageError for a
    model whose context is too short for the built-in prompts.
    """
    with ground(engine) as where:
        yield from Identities(where)()
        yield from Positions(engine)()
        yield from Facts(where)()


def run_gate(engine: Engine) -> Gate:
    """All of them."""
    return Gate.of(gate_checks(engine))
