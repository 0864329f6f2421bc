"""Redis and Valkey: one string an entry, read by range, and one set a group."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store.errors import UsageError
from cache_store.tiers.addresses import Address
from cache_store.tiers.protocol import Bytes, Head, RemoteError, RemoteRefused

MAX_OBJECT = 512 * 1024 * 1024
"""What a server takes as one string, unless it is set up otherwise."""

_CONNECTIONS = 32
_SCAN = 1000


class RedisRemote:
    """A `Remote` on a server that speaks Redis' protocol.

    `PREFIXv1/GROUP/ENTRY` is an entry's string and `PREFIXv1/GROUP/` the set of its group's
    entries. A server that evicts strings by itself leaves names in sets; they count as not there.
    """

    def __init__(self, client: redis.Redis, address: str, prefix: str) -> None:
        self._client, self._address, self._prefix = client, address, prefix

    @classmethod
    def at(cls, address: Address, timeout: float) -> RedisRemote:
        """Raises UsageError for an address that the client can't take."""
        try:
            pool = redis.BlockingConnectionPool.from_url(
                address.url,
                db=int(address.options["db"]) if "db" in address.options else None,
                max_connections=_CONNECTIONS,
                timeout=timeout,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),  # once late is late: the breaker decides what follows
                protocol=2,
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"{address.shown} is no address of a Redis server") from error
        client = redis.Redis.from_pool(pool)
        return cls(client, address.shown, address.options.get("prefix", "cacheblend").strip("/"))

    @property
    def address(self) -> str:
        return self._address

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except redis.TimeoutError as error:
            raise RemoteError(f"{self._address} did not answer in time") from error
        except redis.AuthenticationError as error:
            raise RemoteRefused(f"{self._address} refuses the credentials") from error
        except redis.ConnectionError as error:
            raise RemoteError(f"{self._address}: {_first_line(error)}") from error
        except redis.RedisError as error:
            raise RemoteRefused(f"{self._address}: {_first_line(error)}") from error
        except (OSError, ValueError) as error:  # an answer that isn't Redis'
            raise RemoteError(f"{self._address}: {_first_line(error)}") from error

    def names(self, prefixes: Sequence[str]) -> list[list[str]]:
        if any(prefix.count("/") < 2 for prefix in prefixes):
            return [self._scan(prefix) for prefix in prefixes]
        found: list[list[str]] = []
        with self._asking():
            pipe = self._client.pipeline(transaction=False)
            for prefix in prefixes:
                pipe.smembers(self._key(prefix))
            for prefix, members in zip(prefixes, pipe.execute(), strict=True):
                found.append(sorted(prefix + _text(member) for member in members))
        return found

    def _scan(self, prefix: str) -> list[str]:
        """Names beneath what is more than a group: looked for, a group's set at a time."""
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._key(prefix))
        start = len(self._prefix) + 1
        with self._asking():
            keys = [_text(k) for k in self._client.scan_iter(match=f"{pattern}*", count=_SCAN)]
        return sorted(key[start:] for key in keys if not key.endswith("/"))

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        if not names:
            return []
        with self._asking():
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.strlen(self._key(name))
                pipe.getrange(self._key(name), 0, length - 1)
            answers = pipe.execute()
        return [
            Head(size, data) if size else None
            for size, data in zip(answers[::2], answers[1::2], strict=True)
        ]

    def get(self, name: str, start: int, length: int) -> Bytes:
        if length <= 0:
            return b""
        with self._asking():
            return cast(bytes, self._client.getrange(self._key(name), start, start + length - 1))

    def put(self, name: str, data: memoryview) -> None:
        if data.nbytes > MAX_OBJECT:
            raise RemoteRefused(
                f"{self._address}: an entry of {data.nbytes} bytes is more than a string may have"
            )
        group, _, entry = name.rpartition("/")
        with self._asking():
            pipe = self._client.pipeline(transaction=True)
            pipe.set(self._key(name), data)
            pipe.sadd(self._key(group + "/"), entry)
            pipe.execute()

    def delete(self, name: str) -> None:
        group, _, entry = name.rpartition("/")
        with self._asking():
            pipe = self._client.pipeline(transaction=True)
            pipe.delete(self._key(name))
            pipe.srem(self._key(group + "/"), entry)
            pipe.execute()

    def close(self) -> None:
        with contextlib.suppress(redis.RedisError, OSError):
            self._client.connection_pool.disconnect()
            self._client.close()


def _text(raw: Any) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
