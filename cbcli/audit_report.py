"""What was audited of a store's answers, for `cacheblend store stats`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cache_store.errors import CacheblendError
from cache_store.store import ChunkStore
from cbcli.output import Output
from cbcli.records import model_record
from cbcli.units import count_text, duration_text
from engine.audit import LAST, AuditGroup, AuditLog, audit_groups

DIGITS = 12  # of a model without a name


@dataclass(frozen=True)
class AuditReport:
    """groups: the one audited last first; damaged: lines of the log that were left out; names:
    models' names by fingerprint; error: why the log could not be read."""

    groups: tuple[AuditGroup, ...]
    damaged: int
    names: Mapping[str, str | None]
    error: CacheblendError | None = None

    @classmethod
    def of(cls, store: ChunkStore) -> AuditReport:
        """A log that cannot be read is no reason to tell nothing of the store."""
        try:
            records, damaged = AuditLog(store.journal).records()
        except CacheblendError as error:
            return cls((), 0, {}, error)
        groups = tuple(audit_groups(records))
        names = {group.model: store.catalog.model_name(group.model) for group in groups}
        return cls(groups, damaged, names)

    @property
    def audited(self) -> int:
        """Prompts in the log."""
        return sum(group.audited for group in self.groups)

    def described(self) -> dict[str, Any]:
        """For --json."""
        groups = []
        for group in self.groups:
            fields = asdict(group)
            fingerprint = fields.pop("model")
            model = model_record(self.names[fingerprint], fingerprint)
            groups.append({"model": model, **fields})
        return {
            "audited": self.audited,
            "damaged_lines": self.damaged,
            "mean_of_last": LAST,
            "groups": groups,
        }

    def show(self, out: Output) -> None:
        """Below the store's numbers."""
        if not self.groups:
            return
        out.line()
        headers = ["audited", "dtype", "task", "policy", "transfer"]
        right = ["ratio", "prompts", "mean KL", "worst", "top-1"]
        rows = [self._row(group) for group in self.groups]
        out.table([*headers, *right, "last"], rows, right=right)

    def warn(self, out: Output) -> None:
        """Says what could not be read."""
        if self.error is not None:
            out.warn(f"what was audited could not be read: {self.error.message}", self.error.hint)
        if self.damaged:
            out.warn(f"damaged lines of the audit log left out: {self.damaged:,}")

    def _row(self, group: AuditGroup) -> list[str]:
        return [
            self.names[group.model] or group.model[:DIGITS],
            group.dtype,
            group.task,
            group.policy if group.mode == "blend" else group.mode,
            "" if group.transfer is None else "yes" if group.transfer else "no",
            ",".join(f"{ratio:g}" for ratio in group.ratios)
            or (f"{group.threshold:g} held" if group.threshold is not None else ""),
            count_text(group.audited),
            f"{group.kl_mean:.4f}",
            f"{group.kl_worst:.4f}",
            f"{100 * group.top1_agreement:.1f}%",
            f"{duration_text(max(0.0, time.time() - group.last_at))} ago",
        ]
