"""Fixtures of the real broker; a folder's conftest imports those that its tests ask for."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest

from tests.kafka.broker import Broker, shared_broker


@pytest.fixture(scope="session")
def kafka_broker() -> Broker:
    """A real broker, the same for all tests of this process: use topics of your own, by a prefix. Fails where none
    can be had."""
    return shared_broker()


@pytest.fixture
def mortal_broker(kafka_broker: Broker) -> Iterator[Broker]:
    """The same one for tests that kill, stop or pause it: it runs again afterwards, whatever became of the test."""
    yield kafka_broker
    kafka_broker.revive()
    with warnings.catch_warnings():  # aiokafka lets go of a connection that breaks before it has closed it
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
