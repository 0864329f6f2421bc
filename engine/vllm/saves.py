"""Chunks that prompts missed, waiting to be computed alone and stored."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.prompt import Segment
from engine.vllm.plan import SavePlan

BUSY_STEPS = 16
"""While requests run, a chunk is saved every so many steps: it holds all of them up."""
MOST_TOKENS = 4_000_000
"""Waiting tokens, with the prefixes they stand behind: what comes beyond is not saved, and will be
missed and come again."""


@dataclass(frozen=True)
class _Chunk:
    prefix: tuple[int, ...]
    token_ids: tuple[int, ...]
    chunk_id: str | None


class SaveQueue:
    """In the order they were missed, each once.

    A save is a computation like a prefill, so it is done where nobody waits: a chunk at a time
    while the engine has nothing else to do, so that a request that comes meanwhile waits for one
    chunk at most. An engine that is never idle still gets through, slowly. context: what chunks
    are computed behind; None: their prompt's prefix. idles: whether the engine makes steps that
    nobody asked for; where it doesn't, all that waits is done in the next step it makes.
    """

    def __init__(self, context: tuple[int, ...] | None = None, *, idles: bool = True) -> None:
        self._context, self._idles = context, idles
        self._waiting: OrderedDict[tuple[tuple[int, ...], tuple[int, ...]], _Chunk] = OrderedDict()
        # Each prefix once, and how many chunks wait behind it.
        self._prefixes: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        self._tokens = 0
        self._busy = 0  # steps with requests since the last save

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prefix: tuple[int, ...], missed: Sequence[Segment]) -> int:
        """Returns how many of a prompt's missed chunks are going to be stored."""
        number = 0
        for segment in missed:
            prefix, behind = self._prefixes.get(prefix, (prefix, 0))
            size = len(segment.token_ids) + (0 if behind else len(prefix))
            place = (prefix if self._context is None else self._context, segment.token_ids)
            if place not in self._waiting:
                if self._tokens + size > MOST_TOKENS:
                    continue
                self._waiting[place] = _Chunk(prefix, segment.token_ids, segment.chunk_id)
                self._prefixes[prefix] = prefix, behind + 1
                self._tokens += size
            number += 1
        return number

    def take(self, *, busy: bool) -> tuple[SavePlan, ...]:
        """What is to be saved in the step that begins now. busy: requests run in it."""
        if not self._waiting:
            return ()
        if not self._idles:
            return tuple(self._next() for _ in range(len(self._waiting)))
        self._busy = self._busy + 1 if busy else BUSY_STEPS
        if self._busy < BUSY_STEPS:
            return ()
        self._busy = 0
        return (self._next(),)

    def clear(self) -> None:
        self._waiting.clear()
        self._prefixes.clear()
        self._tokens = 0

    def _next(self) -> SavePlan:
        _, chunk = self._waiting.popitem(last=False)
        self._tokens -= len(chunk.token_ids)
        prefix, behind = self._prefixes.pop(chunk.prefix)
        if behind > 1:
            self._prefixes[prefix] = prefix, behind - 1
        else:
            self._tokens -= len(prefix)
        context = chunk.prefix if self._context is None else self._context
        return SavePlan(chunk.prefix, ((chunk.token_ids, chunk.chunk_id),), context)
