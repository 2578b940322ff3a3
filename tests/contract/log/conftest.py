from __future__ import annotations

import pytest

from tests.contract.log.kinds import Kafka, Kind, Memory
from tests.kafka.fixtures import kafka_broker, mortal_broker  # noqa: F401


@pytest.fixture(params=["memory", "kafka"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "memory":
        return Memory()
    return Kafka(request.getfixturevalue("kafka_broker"))
