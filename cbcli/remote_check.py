"""What `doctor` has to say of the remote store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from cache_store.tiers.addresses import connect, masked, read_address
from cache_store.tiers.naming import entry_name, group_prefix
from cache_store.tiers.protocol import RemoteError
from cbcli.checks import Check
from cbcli.settings import Settings
from cbcli.units import duration_text

_TRIES = 5


def check_remote(settings: Settings) -> Iterator[Check]:
    """Whether the remote answers, how soon, and whether it takes something, which is removed."""
    if settings.remote is None:
        return
    facts: dict[str, object] = {"remote": masked(settings.remote), "writable": False}
    remote = connect(read_address(settings.remote), settings.remote_timeout)
    group, key = secrets.token_hex(32), secrets.token_hex(32)
    try:
        remote.names([group_prefix(group)])  # the first one connects
        times = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            remote.names([group_prefix(group)])
            times.append(time.perf_counter() - began)
        facts["latency"] = min(times)
        said = f"{remote.address} answers in {duration_text(min(times))}"
        try:
            remote.put(entry_name(group, key), memoryview(b"cacheblend doctor"))
            remote.delete(entry_name(group, key))
        except RemoteError as error:
            hint = "what is stored here isn't uploaded; what it has is read"
            yield Check(
                "remote", "warn", f"{said}, but takes nothing: {error.message}", hint, facts
            )
            return
        yield Check("remote", "ok", said, facts={**facts, "writable": True})
    except RemoteError as error:
        hint = error.hint or "prompts are answered without it, after waiting for it"
        yield Check("remote", "warn", error.message, hint, facts)
    finally:
        remote.close()
