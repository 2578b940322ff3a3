"""A real broker, and caches that all clusters of a run share."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster
from tests.integration.pipeline.topics import Topics
from tests.kafka.broker import Broker, make_broker
from tests.kafka.fixtures import kafka_broker

__all__ = ["kafka_broker"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    """A real broker that the test may kill."""
    broker = make_broker(tmp_path / "broker")
    try:
        broker.start()
        yield broker
    finally:
        broker.remove()


@pytest.fixture
def prefix() -> str:
    """Topics of this test's own on the broker that all tests share."""
    return f"t{uuid.uuid4().hex[:8]}."


@pytest.fixture(scope="module")
def module_prefix() -> str:
    """Of the topics of a cluster that a module's tests share."""
    return f"t{uuid.uuid4().hex[:8]}."


@pytest.fixture
async def topics(cluster: Cluster) -> AsyncIterator[Topics]:
    """The topics of the module's cluster."""
    async with Topics.of(cluster) as opened:
        yield opened
