"""The index row that lists a chunk's entries, so that finding one opens at most one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from cache_store.entry import EntryHeader
from cache_store.errors import IntegrityError
from cache_store.keys import KVSpec

_VERSION = 1


@dataclass(frozen=True)
class Member:
    """One entry of a group: what it was computed behind, and in which length regime."""

    key: str
    context: tuple[int, ...]
    regime: str


@dataclass(frozen=True)
class Group:
    """All entries of one chunk for one model. tokens: length of the chunk."""

    spec: KVSpec
    tokens: int
    chunk_id: str
    members: tuple[Member, ...] = ()

    @classmethod
    def of(cls, header: EntryHeader) -> Group:
        """A group of the one entry that has this header."""
        member = Member(header.key, header.context, header.regime)
        return cls(header.spec, len(header.token_ids), header.chunk_id, (member,))

    def with_members_of(self, other: Group) -> Group:
        """This group and the members of another; one with the same key is replaced."""
        new = {member.key for member in other.members}
        kept = tuple(member for member in self.members if member.key not in new)
        chunk_id = self.chunk_id or other.chunk_id
        return replace(self, members=kept + other.members, chunk_id=chunk_id)

    def without(self, key: str) -> Group:
        """This group without one of its entries."""
        return replace(self, members=tuple(member for member in self.members if member.key != key))

    def encode(self) -> bytes:
        """The row's value: JSON."""
        row = {
            "v": _VERSION,
            "spec": asdict(self.spec),
            "tokens": self.tokens,
            "chunk": self.chunk_id,
            "entries": [[m.key, m.regime, m.context] for m in self.members],
        }
        return json.dumps(row, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, key: str, value: bytes) -> Group:
        """Raises IntegrityError for bytes that `encode` didn't write."""
        try:
            row = json.loads(value.decode())
            if row["v"] != _VERSION:
                raise ValueError(f"version {row['v']}")
            return cls(
                _spec(**row["spec"]),
                int(row["tokens"]),
                str(row["chunk"]),
                tuple(_member(*entry) for entry in row["entries"]),
            )
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise IntegrityError(
                f"the index's list of entries of chunk {key[:12]} is damaged",
                "run: cacheblend store verify --repair",
            ) from error


_spec = lru_cache(64, typed=True)(KVSpec)  # most groups of a store have the same


def _member(key: Any, regime: Any, context: Any) -> Member:
    if not isinstance(key, str) or not isinstance(regime, str):
        raise ValueError("not an entry")
    return Member(key, tuple(map(int, context)), regime)


def shared_length(recorded: Sequence[int], actual: Sequence[int]) -> int:
    """How many leading tokens two contexts have in common."""
    length = min(len(recorded), len(actual))
    if tuple(recorded[:length]) == tuple(actual[:length]):
        return length
    return next(i for i in range(length) if recorded[i] != actual[i])


def ranked(
    members: Sequence[Member],
    context: Sequence[int],
    regime: str,
    strict_context: Sequence[int] | None = None,
) -> list[Member]:
    """Members by how well they fit a chunk that comes behind `context`, best first.

    An exact one is first, then the longest shared context counts; among equals the same regime,
    the shorter recorded context, and the key, so that the choice is always the same.
    """
    actual = tuple(context)
    if strict_context is not None:
        wanted = tuple(strict_context)
        members = [member for member in members if member.context == wanted]

    def order(member: Member) -> tuple[bool, int, bool, int, str]:
        other_regime = member.regime != regime
        return (
            other_regime or member.context != actual,
            -shared_length(member.context, actual),
            other_regime,
            len(member.context),
            member.key,
        )

    return sorted(members, key=order)
