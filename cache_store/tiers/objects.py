"""S3, Google Cloud Storage, Azure and shared folders, through obstore."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

from cache_store.errors import UsageError
from cache_store.tiers.addresses import Address
from cache_store.tiers.protocol import Bytes, Head, RemoteError, RemoteRefused

AT_ONCE = 16
"""Requests under way at a time where many objects are asked for: each takes a while."""

_FLAGS = ("allow_http", "virtual_hosted_style_request", "skip_signature", "use_emulator")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ObjectRemote:
    """A `Remote` in a bucket, container or folder."""

    def __init__(self, store: Any, address: str, folder: Path | None = None) -> None:
        self._opened, self._address, self._folder = store, address, folder
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="remote-objects")

    @classmethod
    def at(cls, address: Address, timeout: float) -> ObjectRemote:
        """Endpoint, region and credentials come from the environment as usual (`AWS_*`, …), or
        from the address. Raises UsageError for what obstore can't take."""
        try:
            if address.family == "file":
                folder = Path(unquote(urlsplit(address.url).path))
                return cls(None, address.shown, folder)
            wait = timedelta(seconds=timeout)
            client: dict[str, Any] = {"timeout": wait, "connect_timeout": wait}
            given: dict[str, Any] = {
                name: value.lower() in ("1", "true", "yes") if name in _FLAGS else value
                for name, value in address.options.items()
            }
            endpoint = given.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
            plain = given.pop("allow_http", False) or endpoint.startswith("http://")
            if plain or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes"):
                client["allow_http"] = True
            once = {"max_retries": 0, "retry_timeout": wait}
            store = from_url(address.url, client_options=client, retry_config=once, **given)  # type: ignore[call-overload]
        except (BaseError, OSError, ValueError, TypeError) as error:
            raise UsageError(f"{address.shown}: {_first_line(error)}") from error
        return cls(store, address.shown)

    @property
    def address(self) -> str:
        return self._address

    @property
    def _store(self) -> Any:
        """What obstore is asked through. Raises RemoteRefused where a folder isn't there: it isn't
        made, for it may be one of a disk that isn't mounted."""
        if self._folder is not None:
            if not self._folder.is_dir():
                raise RemoteRefused(
                    f"{self._address}: there is no such folder", "mount its disk, or make it"
                )
            if self._opened is None:
                self._opened = LocalStore(self._folder)
        return self._opened

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
            raise RemoteRefused(f"{self._address} refuses the credentials") from error
        except FileNotFoundError as error:  # of an object it is caught before
            raise RemoteRefused(f"{self._address}: there is no such bucket or folder") from error
        except (BaseError, OSError, ValueError) as error:
            text = _first_line(error)
            late = "timed out" in str(error) or "TimedOut" in str(error)
            raise RemoteError(
                f"{self._address} did not answer in time" if late else f"{self._address}: {text}"
            ) from error

    def _each(self, action: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        if len(items) == 1:
            return [action(items[0])]
        return list(self._pool.map(action, items))

    def names(self, prefixes: Sequence[str]) -> list[list[str]]:
        return self._each(self._names, prefixes)

    def _names(self, prefix: str) -> list[str]:
        with self._asking():
            pages = obstore.list(self._store, prefix=prefix.rstrip("/"), chunk_size=1000)
            return sorted(item["path"] for page in pages for item in page)

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        return self._each(lambda name: self._head(name, length), names)

    def _head(self, name: str, length: int) -> Head | None:
        with self._asking():
            try:
                found = obstore.get(self._store, name, options={"range": (0, max(1, length))})
                return Head(found.meta["size"], memoryview(found.bytes()))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def get(self, name: str, start: int, length: int) -> Bytes:
        if length <= 0:
            return b""
        with self._asking():
            try:
                return memoryview(obstore.get_range(self._store, name, start=start, length=length))
            except FileNotFoundError:
                return b""

    def put(self, name: str, data: memoryview) -> None:
        with self._asking():
            obstore.put(self._store, name, data)  # in parts where it is large

    def delete(self, name: str) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _first_line(error: Exception) -> str:
    """An error's own first line. What follows it are request and response, with all they hold."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
