from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache_store.tiers.servers import RedisServer, redis_server


@pytest.fixture(scope="module")
def redis_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_of_module: RedisServer) -> str:
    """A server that is there for the whole module, empty."""
    redis_of_module.command("FLUSHALL")
    return redis_of_module.url


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3_url(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket of its own on a real S3 server."""
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "hush",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3_port}",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(tmp_path)) % 10**12}"
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/kv"


@pytest.fixture(params=["redis", "s3", "file"])
def remote_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """One remote of each kind."""
    if request.param == "file":
        (tmp_path / "shared").mkdir()
        return f"file://{tmp_path}/shared"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url
