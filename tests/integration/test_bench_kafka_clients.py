"""The benchmark of Kafka's clients on a real broker."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from benchmarks.micro import kafka_clients
from benchmarks.micro.kafka_clients import CLIENTS
from tests.kafka.broker import Broker
from tests.kafka.fixtures import kafka_broker as kafka_broker


@pytest.mark.parametrize("client", CLIENTS)
def test_every_record_that_is_appended_is_read_and_costs_something(client: str, kafka_broker: Broker) -> None:
    if client != "aiokafka" and importlib.util.find_spec("confluent_kafka") is None:
        pytest.skip("librdkafka's client is not installed (pip install confluent-kafka)")
    asyncio.run(kafka_clients.ensure(kafka_broker.address))
    found = asyncio.run(kafka_clients.turn(client, kafka_broker.address, rate=50.0, seconds=1.0, seed=1))
    assert len(found.delays) > 20
    assert 0 < min(found.delays) < max(found.delays) < kafka_clients.WAIT_S
    assert 0 < found.processor < 1


def test_ratios_are_of_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {("aiokafka", 1): 2e-3, ("librdkafka", 1): 1e-3, ("aiokafka", 2): 4e-3, ("librdkafka", 2): 3e-3}

    async def turn(client: str, address: str, rate: float, seconds: float, seed: int) -> kafka_clients.Turn:
        return kafka_clients.Turn([0.002, 0.004], spent.get((client, seed), 9.0))

    monkeypatch.setattr(kafka_clients, "turn", turn)
    _, other = rows = kafka_clients.measured("", list(CLIENTS), 1.0, 1.0, 2)
    assert other["cpu_ms"] == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert other["cpu_over_aiokafka"] == {"median": 0.625, "min": 0.5, "max": 0.75}
    assert other["p99_ms"]["max"] == 4.0
    assert len(kafka_clients.table(rows).splitlines()) == 3
