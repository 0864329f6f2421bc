"""What the scheduler's side of the connector asks of the workers' side; all of it pickles."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.options import BlendOptions
from engine.prompt import Prompt
from engine.sources import Source
from engine.trace.record import Level


@dataclass(frozen=True)
class RequestPlan:
    """What is known of a request that names chunks, from its arrival to its end.

    prompt: the request's own token ids, as segments. options: how it is blended. save: whether its
    missed chunks are stored for the next prompts. question_tokens: how many of the suffix's tokens
    are the question that a policy reads, from the suffix's beginning on; None: all of them. trace:
    whether and how its run is recorded.
    """

    request_id: str
    prompt: Prompt
    options: BlendOptions
    save: bool = True
    question_tokens: int | None = None
    trace: Level | None = None

    @property
    def end(self) -> int:
        """Where the last chunk ends: vLLM itself computes what comes after."""
        return self.prompt.segments[-1].start


@dataclass(frozen=True)
class BlendPlan:
    """One request whose KV, up to `request.end`, is to be in vLLM's blocks before its next forward.

    sources: one a segment, found by the scheduler's side. block_ids: the request's, from its first
    token on. held: so many leading tokens are in their blocks already, shared with others, and are
    not written again. salt: what only requests have in common that are blended in the very same
    way; "" where that isn't known.
    """

    request: RequestPlan
    sources: tuple[Source, ...]
    block_ids: tuple[int, ...]
    held: int
    salt: str = ""


@dataclass(frozen=True)
class SavePlan:
    """Chunks to be computed alone and stored: token ids and ids. prefix: their prompt's, stored
    too. context: what they are computed behind; None: the prefix."""

    prefix: tuple[int, ...]
    chunks: tuple[tuple[tuple[int, ...], str | None], ...]
    context: tuple[int, ...] | None = None


@dataclass(frozen=True)
class AuditPlan:
    """A request that has ended, to be compared with full prefill. sources: what it was blended
    from, one a segment."""

    request: RequestPlan
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class StepPlan:
    """All that is to be done in one step of the engine: blends before its forward, saves and audits
    after."""

    blends: Sequence[BlendPlan] = ()
    saves: Sequence[SavePlan] = ()
    audits: Sequence[AuditPlan] = ()
