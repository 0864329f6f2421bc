"""Every kind of remote keeps the protocol's promises, and fails the same way."""

import shutil
import time
from pathlib import Path

import pytest

from cache_store.errors import UsageError
from cache_store.tiers.addresses import connect, masked, read_address
from cache_store.tiers.protocol import RemoteError, RemoteRefused
from tests.cache_store.tiers.servers import Proxy, RedisServer, free_port, redis_server

GROUP, OTHER = "a" * 64, "b" * 64
NAME = f"v1/{GROUP}/{'1' * 64}"
DATA = bytes(range(256)) * 400


def remote_at(url, timeout=5.0):
    return connect(read_address(url), timeout)


def test_objects_are_put_listed_read_by_range_and_deleted(remote_url: str) -> None:
    remote = remote_at(remote_url)
    second, third = f"v1/{GROUP}/{'2' * 64}", f"v1/{OTHER}/{'3' * 64}"
    assert remote.names([f"v1/{GROUP}/", f"v1/{OTHER}/"]) == [[], []]
    for name in (NAME, second, third):
        remote.put(name, memoryview(DATA))
    assert remote.names([f"v1/{GROUP}/", f"v1/{'c' * 64}/"]) == [[NAME, second], []]
    assert remote.names(["v1/"]) == [[NAME, second, third]]
    heads = remote.heads([NAME, "v1/none/" + "4" * 64], 100)
    assert heads[0] is not None
    assert (heads[0].size, bytes(heads[0].data), heads[1]) == (len(DATA), DATA[:100], None)
    assert bytes(remote.get(NAME, 1000, 77)) == DATA[1000:1077]
    assert bytes(remote.get(NAME, len(DATA) - 5, 500)) == DATA[-5:]
    assert bytes(remote.get("v1/none/" + "4" * 64, 0, 10)) == b""
    remote.put(NAME, memoryview(b"other"))
    assert bytes(remote.get(NAME, 0, 100)) == b"other"
    remote.delete(NAME)
    remote.delete(NAME)
    assert remote.names([f"v1/{GROUP}/"]) == [[second]]
    assert remote.heads([NAME], 1) == [None]
    remote.close()
    remote.close()


def test_a_server_is_reached_by_its_socket(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    with redis_server(tmp_path, "--unixsocket", str(socket)):
        remote = remote_at(f"unix://{socket}?db=1")
        remote.put(NAME, memoryview(DATA))
        assert bytes(remote.get(NAME, 0, 10)) == DATA[:10]
        remote.close()


def test_a_folder_that_goes_away_is_not_made_again(tmp_path: Path) -> None:
    remote = remote_at(f"file://{tmp_path}/mnt")
    with pytest.raises(RemoteError, match="no such folder"):
        remote.put(NAME, memoryview(DATA))
    (tmp_path / "mnt").mkdir()
    remote.put(NAME, memoryview(DATA))
    shutil.rmtree(tmp_path / "mnt")
    with pytest.raises(RemoteError, match="no such folder"):
        remote.put(NAME, memoryview(DATA))
    assert not (tmp_path / "mnt").exists()
    remote.close()


def test_two_prefixes_share_one_server(redis_url: str) -> None:
    one, two = remote_at(redis_url + "?prefix=one"), remote_at(redis_url + "?prefix=two")
    one.put(NAME, memoryview(DATA))
    assert two.heads([NAME], 1) == [None]
    assert two.names(["v1/"]) == [[]]
    one.close()
    two.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_nobody_there_is_told_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    remote = remote_at(f"redis://127.0.0.1:{port}" if kind == "redis" else "s3://bucket")
    began = time.monotonic()
    for ask in (
        lambda: remote.names([f"v1/{GROUP}/"]),
        lambda: remote.heads([NAME], 1),
        lambda: remote.get(NAME, 0, 1),
        lambda: remote.put(NAME, memoryview(DATA)),
        lambda: remote.delete(NAME),
    ):
        with pytest.raises(RemoteError):
            ask()
    assert time.monotonic() - began < 4
    remote.close()


def test_a_silent_server_is_waited_for_no_longer_than_the_time_out(
    redis_of_module: RedisServer,
) -> None:
    remote = remote_at(redis_of_module.url, 0.3)
    remote.put(NAME, memoryview(DATA))
    redis_of_module.pause()
    try:
        began = time.monotonic()
        with pytest.raises(RemoteError, match="in time"):
            remote.get(NAME, 0, 10)
        assert time.monotonic() - began < 3
    finally:
        redis_of_module.go_on()
    assert bytes(remote.get(NAME, 0, 4)) == DATA[:4]  # another connection, another answer
    remote.close()


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_connection_lost_in_the_middle_is_an_error(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    whole = remote_at(url)
    whole.put(NAME, memoryview(DATA))
    whole.close()
    port = (
        request.getfixturevalue("redis_of_module").port
        if kind == "redis"
        else request.getfixturevalue("s3_port")
    )
    with Proxy(port, cut_after=20_000) as proxy:
        if kind == "redis":
            url = f"redis://127.0.0.1:{proxy.port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        remote = remote_at(url)
        with pytest.raises(RemoteError):
            remote.get(NAME, 0, len(DATA))
        remote.close()


def test_a_full_server_refuses_and_serves_on(redis_of_module: RedisServer) -> None:
    redis_of_module.command("FLUSHALL")
    remote = remote_at(redis_of_module.url)
    remote.put(NAME, memoryview(DATA))
    redis_of_module.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    redis_of_module.command("CONFIG", "SET", "maxmemory", "1mb")
    try:
        with pytest.raises(RemoteRefused, match="memory"):
            remote.put(f"v1/{OTHER}/{'3' * 64}", memoryview(DATA))
        assert remote.names([f"v1/{OTHER}/"]) == [[]]  # neither half of it is there
        assert bytes(remote.get(NAME, 0, 4)) == DATA[:4]
    finally:
        redis_of_module.command("CONFIG", "SET", "maxmemory", "0")
    remote.close()


def test_wrong_credentials_are_told_without_them(
    redis_url: str, redis_of_module: RedisServer
) -> None:
    remote = remote_at(f"redis://:sesame@127.0.0.1:{redis_of_module.port}")
    with pytest.raises(RemoteError) as caught:
        remote.heads([NAME], 1)
    assert "sesame" not in caught.value.message
    remote.close()


def test_a_missing_bucket_is_told(s3_url: str) -> None:
    remote = remote_at("s3://nobody-made-this-one")
    with pytest.raises(RemoteError):
        remote.put(NAME, memoryview(DATA))
    with pytest.raises(RemoteError):
        remote.heads([NAME], 1)
    remote.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pass@h:1/2?prefix=a", "redis://***@h:1/2?prefix=a"),
        ("s3://b/p?region=x&secret_access_key=k", "s3://b/p?region=x&secret_access_key=***"),
        ("redis://h", "redis://h"),
        ("redis://h?bogus=secretpw", "redis://h?bogus=***"),
    ],
)
def test_addresses_are_shown_without_secrets(url: str, shown: str) -> None:
    assert masked(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis",
        "http://h",
        "redis://",
        "s3://",
        "file://",
        "file://host/x",
        "unix:",
        "redis://h:99999",
        "redis://h?password=x",
        "s3://b?access_key_id=x",
        "redis://h#x",
        "file:relative",
        "unix:relative",
        "redis://h/notanumber",
        "redis://h?db=-1",
        "redis://a\nb",
        "s3://b\tc",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match=r"://|address") as caught:
        read_address(url)
    assert "password=x" not in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("redis", "cache_store.tiers.redis", "obstore", "cache_store.tiers.objects"):
        monkeypatch.setitem(sys.modules, name, None)
    for url, extra in (("redis://h", "redis"), ("s3://b", "obstore")):
        with pytest.raises(UsageError) as caught:
            remote_at(url)
        assert caught.value.hint == f"pip install 'cacheblend[{extra}]'"
