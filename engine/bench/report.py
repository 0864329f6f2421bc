"""What a bench returns, and its documented JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from engine.bench.conditions import Conditions
from engine.bench.peers import PeerFacts
from engine.bench.ttft import CostFit
from engine.results import ModelInfo


@dataclass(frozen=True)
class Report:
    """One bench. rows: of one of the classes TtftRow, IngestRow, LoadRow and DecodeRow; fits:
    of TTFT only. engine: torch or vllm."""

    bench: str
    conditions: Conditions
    model: ModelInfo
    pairs: int
    peers: tuple[PeerFacts, ...]
    rows: tuple[Any, ...]
    fits: tuple[CostFit, ...] = ()
    engine: str = "torch"

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; seconds, bytes and tokens, unrounded."""
        return {"schema": 1, **asdict(self)}
