"""A real broker, and caches that all clusters of a run share."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from greenroom.core.units import MIB
from tests.integration.cluster import Cluster
from tests.integration.pipeline.topics import Topics
from tests.kafka.broker import Broker, make_broker
from tests.kafka.fixtures import kafka_broker, mortal_broker
from tests.kafka.small_disk import NotMountable, SmallDisk, small_disk

__all__ = ["kafka_broker", "mortal_broker"]

DISK_BYTES = 256 * MIB


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def broker_on_small_disk(tmp_path: Path) -> Iterator[tuple[Broker, SmallDisk]]:
    """A real broker whose data has a file system of its own, for the test to fill."""
    if shutil.which("java") is None or shutil.which("mvn") is None:
        pytest.skip("the broker would be a container's, whose disk is not ours to fill: install Java and Maven")
    try:
        with small_disk(tmp_path / "broker" / "data", DISK_BYTES) as disk:
            broker = make_broker(tmp_path / "broker")
            try:
                broker.start()
                yield broker, disk
            finally:
                broker.remove()
    except NotMountable as error:
        pytest.skip(str(error))


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
