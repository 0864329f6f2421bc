"""Which blended requests are checked against full prefill, and when."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.audit import Audit
from engine.sources import Source
from engine.vllm.plan import AuditPlan, RequestPlan

PATIENCE = 60.0
"""Seconds that an audit waits for the engine to be idle: it takes longer than a full prefill, and
all requests wait for it."""
MOST = 8
"""Audits that wait: what comes beyond is not audited."""


@dataclass(frozen=True)
class _Waiting:
    plan: AuditPlan
    since: float


class AuditQueue:
    """audit: whose log counts the prompts; None: there are none. idles: see `SaveQueue`."""

    def __init__(
        self,
        audit: Audit | None,
        *,
        idles: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._audit, self._idles, self._clock = audit, idles, clock
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, request: RequestPlan, sources: Sequence[Source]) -> None:
        """A request that was blended from these sources has ended; it is counted, and audited
        where it is due. Raises CacheblendError where the log fails."""
        if self._audit is None or not self._audit.is_due() or len(self._waiting) >= MOST:
            return
        self._waiting.append(_Waiting(AuditPlan(request, tuple(sources)), self._clock()))

    def take(self, *, busy: bool) -> tuple[AuditPlan, ...]:
        """What is to be audited in the step that begins now, one at most. busy: requests run."""
        if not self._waiting:
            return ()
        late = self._clock() - self._waiting[0].since >= PATIENCE
        if busy and self._idles and not late:
            return ()
        return (self._waiting.popleft().plan,)
