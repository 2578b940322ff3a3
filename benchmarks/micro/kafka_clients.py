"""What a record costs a service by aiokafka, which the services use, and by librdkafka's client.

    python -m benchmarks.kafka_clients [--rate 200] [--seconds 10] [--rounds 5]

One process appends to a real broker on loopback and reads what it appended: idempotent, acknowledged by all, without
lingering, as ``KafkaLog`` does. Each append is awaited by itself and each record is handed to an event loop. The two
take turns. Milliseconds are from an append to when its record was read. Processor time is this process's, of all its
threads. librdkafka's is measured where ``confluent-kafka`` is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, percentile, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.fabric.log.base import Topic
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.kafka.kafka_log import KafkaLog
from tests.kafka.broker import JarBroker

TOPIC: Final = "records"
VALUE: Final = 600
"""Bytes, about as many as a request's records have."""
WAIT_S: Final = 30.0

Append = Callable[[bytes], Awaitable[object]]
Read = Callable[[bytes], None]


@asynccontextmanager
async def aiokafka(address: str, read: Read) -> AsyncIterator[Append]:
    """An append, while every record is given to ``read``."""
    async with KafkaLog(LogConfig(brokers=(address,), prefix="")) as log, log.reader(TOPIC, 0) as reader:

        async def receive() -> None:
            while True:
                for record in await reader.poll(1.0):
                    read(record.value or b"")

        receiving = asyncio.create_task(receive())
        try:
            yield lambda value: log.append(TOPIC, value, partition=0)
        finally:
            receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await receiving


@asynccontextmanager
async def librdkafka(address: str, read: Read) -> AsyncIterator[Append]:
    """As ``aiokafka``. A thread waits for acknowledgements and one for records, as the client is meant to be used."""
    client: Any = importlib.import_module("confluent_kafka")
    loop, ended = asyncio.get_running_loop(), threading.Event()
    producer = client.Producer(
        {"bootstrap.servers": address, "enable.idempotence": True, "acks": "all", "linger.ms": 0}
    )
    consumer = client.Consumer({"bootstrap.servers": address, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([client.TopicPartition(TOPIC, 0, client.OFFSET_END)])

    def acknowledge() -> None:
        while not ended.is_set():
            producer.poll(0.1)

    def receive() -> None:
        while not ended.is_set():
            record = consumer.poll(0.1)
            if record is not None and record.error() is None:
                loop.call_soon_threadsafe(read, record.value())

    def append(value: bytes) -> Awaitable[object]:
        landed: asyncio.Future[None] = loop.create_future()

        def told(error: object, _: object) -> None:
            if error is None:
                loop.call_soon_threadsafe(landed.set_result, None)
            else:
                loop.call_soon_threadsafe(landed.set_exception, RuntimeError(str(error)))

        producer.produce(TOPIC, value, partition=0, on_delivery=told)
        return landed

    threads = [threading.Thread(target=each, name=each.__name__) for each in (acknowledge, receive)]
    for thread in threads:
        thread.start()
    try:
        yield append
    finally:
        ended.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(consumer.close)


CLIENTS: Final = {"aiokafka": aiokafka, "librdkafka": librdkafka}


@dataclass(frozen=True, slots=True)
class Turn:
    """``delays``: seconds from each append to its reading. ``processor``: seconds of this process a record."""

    delays: list[float]
    processor: float


async def turn(client: str, address: str, rate: float, seconds: float, seed: int) -> Turn:
    """Poisson appends at ``rate`` a second. Raises TimeoutError where records do not come."""
    sent: dict[bytes, float] = {}
    delays: list[float] = []
    came = asyncio.Event()

    def read(value: bytes) -> None:
        began = sent.pop(value[:16], None)
        if began is not None:
            delays.append(time.perf_counter() - began)
        came.set()

    async def one(append: Append, number: int) -> None:
        name = b"%16x" % number
        sent[name] = time.perf_counter()
        await append(name.ljust(VALUE, b"."))

    async with asyncio.timeout(WAIT_S + 2 * seconds), CLIENTS[client](address, read) as append:
        while not delays:  # until the reader stands at the end, nothing that is appended comes
            await one(append, random.getrandbits(62))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), 1.0)
        sent.clear()
        delays.clear()
        draw, loop = random.Random(seed), asyncio.get_running_loop()
        spent, due, end = time.process_time(), loop.time(), loop.time() + seconds
        appends: list[asyncio.Task[None]] = []
        while due < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            appends.append(asyncio.create_task(one(append, len(appends))))
            due += draw.expovariate(rate)
        await asyncio.gather(*appends)
        while len(delays) < len(appends):
            came.clear()
            await came.wait()
        return Turn(delays, (time.process_time() - spent) / len(appends))


async def ensure(address: str) -> None:
    """The topic is there."""
    async with KafkaLog(LogConfig(brokers=(address,), prefix="")) as log:
        await log.ensure([Topic(TOPIC, partitions=1)])


def measured(address: str, clients: list[str], rate: float, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each client. ``…_over_aiokafka``: of the same rounds."""
    turns: dict[str, list[Turn]] = {client: [] for client in clients}
    with progress((rounds + 1) * len(clients), "clients", "turn") as bar:
        for round_, client in in_turns(clients, rounds, float("inf")):
            found = asyncio.run(turn(client, address, rate, seconds, round_))
            if round_:
                turns[client].append(found)
            bar.update()
    own = turns["aiokafka"]
    return [
        {
            "client": client,
            "cpu_ms": _spread([1e3 * one.processor for one in each]),
            "p50_ms": _spread([1e3 * percentile(one.delays, 0.5) for one in each]),
            "p99_ms": _spread([1e3 * percentile(one.delays, 0.99) for one in each]),
            "cpu_over_aiokafka": _spread([a.processor / b.processor for a, b in zip(each, own, strict=True)]),
        }
        for client, each in turns.items()
    ]


def _spread(values: list[float]) -> dict[str, float] | None:
    return spread_json(Spread.of(values), 3)


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each client."""
    lines = [f"{'client':<12}{'CPU ms a record':<22}{'read after ms, p50':<22}{'p99':<22}{'CPU over aiokafka'}"]
    for row in rows:
        cells = [median_range(row[name]) for name in ("cpu_ms", "p50_ms", "p99_ms", "cpu_over_aiokafka")]
        lines.append(f"{row['client']:<12}" + "".join(f"{cell:<22}" for cell in cells).rstrip())
    return "\n".join(lines)


@click.command()
@click.option("--rate", default=200.0, show_default=True, help="Records a second.")
@click.option("--seconds", default=10.0, show_default=True, help="Of a turn.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(rate: float, seconds: float, rounds: int) -> None:
    """Both Kafka clients on one broker; a table and, as the last line, a JSON object."""
    clients = [
        name for name in CLIENTS if name == "aiokafka" or importlib.util.find_spec("confluent_kafka") is not None
    ]
    if len(clients) < len(CLIENTS):
        print("librdkafka's client is not installed (pip install confluent-kafka)")
    with tempfile.TemporaryDirectory(prefix="greenroom-bench-") as folder:
        broker = JarBroker(Path(folder) / "broker")
        try:
            broker.start()
            asyncio.run(ensure(broker.address))
            rows = measured(broker.address, clients, rate, seconds, rounds)
        finally:
            broker.remove()
    print(table(rows))
    print(json.dumps({"clients": rows, "rate": rate, "machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
