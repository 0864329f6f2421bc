"""What a chunk's KV is computed behind: the whole prefix, its first token alone, or nothing."""

from typing import Literal, get_args

from cache_store.errors import UsageError

ContextKind = Literal["prefix", "bos", "none"]
CONTEXT_KINDS: tuple[ContextKind, ...] = get_args(ContextKind)


def context_kind(name: str) -> ContextKind:
    """The kind of that name. Raises UsageError."""
    known = next((kind for kind in CONTEXT_KINDS if kind == name), None)
    if known is None:
        raise UsageError(f"context {name!r} is unknown", "use one of " + ", ".join(CONTEXT_KINDS))
    return known


def kind_behind(tokens: int) -> ContextKind:
    """The kind of a stored entry's context, as far as its length tells: a prefix that is one token
    long, with neither template nor system prompt, is its own first token."""
    return "prefix" if tokens > 1 else "bos" if tokens else "none"
