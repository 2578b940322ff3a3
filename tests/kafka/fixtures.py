"""Fixtures of the real broker; a folder's conftest imports those that its tests ask for."""

from __future__ import annotations

import pytest

from tests.kafka.broker import Broker, shared_broker


@pytest.fixture(scope="session")
def kafka_broker() -> Broker:
    """A real broker, the same for the whole run: use topics of your own, by a prefix. Fails where none can be had."""
    return shared_broker()
