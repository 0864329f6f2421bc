"""Addresses of remote stores: what they may look like, and how they are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from cache_store.errors import UsageError
from cache_store.tiers.protocol import Remote

REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")
OBJECTS = ("s3", "gs", "az", "file")
EXPECTED = (
    "redis://…, rediss://…, valkey://…, valkeys://…, unix:///socket, s3://bucket/prefix, gs://…, "
    "az://…, file:///folder"
)

_USER = re.compile(r"(?<=://)[^/?#]*@")
_QUERY = re.compile(r"([?&])([^=&#]+)=([^&#]*)")
_OPTIONS = {
    "redis": {"prefix", "db"},
    "s3": {"endpoint", "region", "allow_http", "virtual_hosted_style_request", "skip_signature"},
    "gs": {"skip_signature"},
    "az": {"account_name", "endpoint", "use_emulator"},
    "file": set[str](),
}
_NUMBER = re.compile(r"[0-9]{1,6}")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # urlsplit leaves some of them out


@dataclass(frozen=True)
class Address:
    """A remote's address, taken apart. family: `redis` or the scheme of an object store; url:
    without the options; options: what stood behind the question mark."""

    scheme: str
    family: str
    url: str = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    shown: str


def masked(url: str) -> str:
    """The address as it may be shown: user names and passwords are left out, and so is what stands
    in options we don't know."""
    known = set[str]().union(*_OPTIONS.values())
    shown = _USER.sub("***@", url)
    return _QUERY.sub(
        lambda found: f"{found[1]}{found[2]}=" + (found[3] if found[2] in known else "***"), shown
    )


def read_address(url: str) -> Address:
    """Takes an address apart. Raises ValueError, whose text is what was expected, without a word of
    what was given: that may be a secret."""
    if _CONTROLS.search(url):
        raise ValueError("an address without control characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(EXPECTED) from None
    scheme = parts.scheme.lower()
    if scheme not in (*REDIS, *OBJECTS) or parts.fragment or port == 0:
        raise ValueError(EXPECTED)
    family = "redis" if scheme in REDIS else scheme
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    strange = sorted(options.keys() - _OPTIONS[family])
    if strange:
        known = ", ".join(sorted(_OPTIONS[family])) or "none"
        raise ValueError(f"an address with no other options than {known}")
    path = unquote(parts.path)
    needs_path = scheme in ("unix", "file")
    if needs_path and (parts.netloc or not path.startswith("/") or len(path) < 2):
        raise ValueError(f"an address such as {scheme}:///path")
    if not needs_path and not (parts.hostname or parts.netloc):
        raise ValueError(EXPECTED)
    if family == "redis":
        numbers = [options.get("db", "0"), "0" if needs_path else path.strip("/") or "0"]
        if not all(_NUMBER.fullmatch(number) for number in numbers):
            raise ValueError(f"a database's number, as in {scheme}://host:port/1")
    # Put together by hand: urllib drops the slashes before an empty host where it doesn't know the
    # scheme.
    plain = f"{_plain_scheme(scheme)}://{parts.netloc}{parts.path}"
    return Address(scheme, family, plain, options, masked(url))


def _plain_scheme(scheme: str) -> str:
    return {"valkey": "redis", "valkeys": "rediss"}.get(scheme, scheme)


def connect(address: Address, timeout: float) -> Remote:
    """The remote at an address; nothing is sent to it yet.

    timeout: seconds to wait for one answer. Raises UsageError where the extra it needs isn't
    installed, and for an address its library can't take.
    """
    if address.family == "redis":
        extra = "redis"
        try:
            from cache_store.tiers.redis import RedisRemote
        except ImportError as error:
            raise _missing(address, extra) from error
        return RedisRemote.at(address, timeout)
    extra = "obstore"
    try:
        from cache_store.tiers.objects import ObjectRemote
    except ImportError as error:
        raise _missing(address, extra) from error
    return ObjectRemote.at(address, timeout)


def _missing(address: Address, extra: str) -> UsageError:
    return UsageError(
        f"{address.shown}: the package {extra} is not installed",
        f"pip install 'cacheblend[{extra}]'",
    )
