"""Worlds that the tests of many commands start from; a file's own fixtures are above them."""

from __future__ import annotations

import pytest

from tests.cbcli.world import World, make_world


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its documents are stored, as small chunks."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("world"), patch)
        world.json("ingest", "docs", "--chunk-tokens", "24")
    return world


@pytest.fixture
def world(ingested: World, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(ingested.root)
    return ingested
