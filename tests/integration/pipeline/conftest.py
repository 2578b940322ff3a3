"""A real broker, and caches that all clusters of a run share."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.kafka.fixtures import kafka_broker

__all__ = ["kafka_broker"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def prefix() -> str:
    """Topics of this test's own on the broker that all tests share."""
    return f"t{uuid.uuid4().hex[:8]}."
