"""A collaboration on Kafka, in processes: workers with real experts are killed while they compute, over a queue.

`make test` has the same within one process: tests/pipeline/inferences/test_lost_engines.py.
"""

from __future__ import annotations

import asyncio
import io
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

from tests.contract.coe.served_board import Board, Sample, make_board
from tests.integration.cluster import Cluster, Process, running
from tests.integration.pipeline.topics import Topics, completed, until
from tests.kafka.broker import Broker
from tests.pipeline.inferences.conftest import body, outputs_of
from tests.random_experts import encoded

_LOG = logging.getLogger(__name__)
EXECUTORS, MOST = 2, 4
LARGER = 16
"""Times as wide and as high as the board's crops: to decode one takes some ten milliseconds, so a queue lasts."""
AHEAD = 1.1
"""Requests that clients have open, of those that are to be queued: some are on their way."""
SETTLED = 0.95
"""Of the requests that are placed, those that workers have by then."""
GIVE_UP_S = 240.0

Answer = tuple[list[str], str]
"""The path of experts, and the last one's label."""


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    return make_board(tmp_path_factory.getbasetemp() / "board")


@pytest.fixture
def scheduling() -> list[str]:
    """Options of the workers."""
    return []


@pytest.fixture
def cluster(
    kafka_broker: Broker, prefix: str, board: Board, tmp_path: Path, scheduling: list[str]
) -> Iterator[Cluster]:
    worker = ["--coe", str(board.file), "--expert-memory", "33%"]
    worker += ["--executors", str(EXECUTORS), "--max-batch", str(MOST), *scheduling]
    made = Cluster(
        tmp_path,
        kafka_broker.address,
        prefix=prefix,
        cache=board.cache,
        workers=2,
        predictors=0,
        options={
            "gateway": ["--coe", "--max-in-flight", "4096"],
            "scheduler": ["--max-waiting", "4096"],
            "worker": worker,
        },
    )
    with running(made):
        yield made


def enlarged(sample: Sample) -> bytes:
    with Image.open(io.BytesIO(sample.image)) as image:
        return encoded(image.resize((LARGER * image.width, LARGER * image.height), Image.Resampling.NEAREST))


class Clients:
    """Each request is a call of its own. ``answers``: of the calls so far, by the sample's number."""

    def __init__(self, http: aiohttp.ClientSession, cluster: Cluster, samples: Sequence[Sample]) -> None:
        self._http = http
        self._url = f"{cluster.urls[0]}/v2/models/board/infer"
        self._bodies = [body([enlarged(sample)], sample.component) for sample in samples]
        self._group = asyncio.TaskGroup()
        self.sent = 0
        self.answers: list[tuple[int, Answer]] = []

    @classmethod
    @asynccontextmanager
    async def of(cls, cluster: Cluster, samples: Sequence[Sample]) -> AsyncIterator[Clients]:
        """Leaving waits for all answers."""
        timeout = aiohttp.ClientTimeout(GIVE_UP_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            made = cls(http, cluster, samples)
            async with made._group:
                yield made

    def send(self, count: int) -> None:
        for _ in range(count):
            self._group.create_task(self._call(self.sent % len(self._bodies)))
            self.sent += 1

    async def _call(self, number: int) -> None:
        """Under a key, so that one that may or may not have been taken, as a log at its limit says, is sent again."""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                async with self._http.post(self._url, json=self._bodies[number], headers=key) as response:
                    if response.status == 200:
                        self.answers.append((number, _answer(await response.json())))
                        return
                    assert response.status == 503, await response.text()
                    pause_s = float(response.headers.get("Retry-After", 1))
                await asyncio.sleep(pause_s)

    @property
    def open(self) -> int:
        return self.sent - len(self.answers)


def _answer(reply: Any) -> Answer:
    outputs = outputs_of(reply)
    [label] = outputs["label"]["data"]
    return [one for one in outputs["path"]["data"] if one], label


async def queue(clients: Clients, scheduler: Process, count: int) -> None:
    """So many requests are known to the scheduler at once: what is answered meanwhile, others are sent for."""

    def holds() -> bool:
        return sum(scheduler.metric(f"greenroom_scheduler_{where}") for where in ("waiting", "placed")) >= count

    async with asyncio.timeout(GIVE_UP_S):
        while not await asyncio.to_thread(holds):
            clients.send(max(0, int(AHEAD * count) - clients.open))


def computes(worker: Process, queued: int) -> bool:
    """It has a batch, and so many that wait."""
    if not worker.ready:
        return False
    running, waiting = worker.metric("greenroom_coe_running"), worker.metric("greenroom_coe_waiting")
    return 1 < running <= EXECUTORS * MOST and waiting >= queued


def half_way(worker: Process) -> float:
    """Requests of two stages of which the first is done and the second is not, at least: if all have two."""
    stages = worker.metric("greenroom_coe_stages_total")
    ended = worker.metric("greenroom_coe_requests_ended_total")  # read last, since both only grow
    return stages - EXECUTORS * MOST - 2 * ended


def settled(scheduler: Process, workers: Sequence[Process]) -> bool:
    """Workers have what was placed on them, nearly. One that is taking thousands is late to say what it executes."""
    placed = scheduler.metric("greenroom_scheduler_placed")
    here = sum(worker.metric("greenroom_worker_runs_here") for worker in workers if worker.ready)
    return scheduler.metric("greenroom_scheduler_waiting") == 0 and here >= SETTLED * placed


async def one_of(scheduler: Process, workers: Sequence[Process], due: Callable[[Process], bool]) -> Process:
    """The first that is due."""
    found: list[Process] = []

    def looks() -> bool:
        if settled(scheduler, workers):
            found.extend(worker for worker in workers if due(worker))
        return bool(found)

    await until(looks, "a worker computes over a queue")
    return found[0]


async def answers_of(cluster: Cluster, samples: Sequence[Sample]) -> list[Answer]:
    """Of an undisturbed run."""
    async with Clients.of(cluster, samples) as clients:
        clients.send(len(samples))
    assert len(clients.answers) == len(samples)
    answers = [answer for _, answer in sorted(clients.answers)]
    assert [path for path, _ in answers] == [list(sample.experts) for sample in samples]
    return answers


async def kill_over_a_queue(
    cluster: Cluster, samples: Sequence[Sample], kills: int, queued: int, due: Callable[[Process], bool]
) -> None:
    """Workers are killed over so many queued requests, each when it is due, and started again. Checks that each request
    ends once, as undisturbed, and that only what was executed counts a loss."""
    scheduler = cluster["scheduler0"]
    workers = [cluster["worker0"], cluster["worker1"]]
    expected = await answers_of(cluster, samples)
    async with Clients.of(cluster, samples) as clients:
        await queue(clients, scheduler, queued)
        for _ in range(kills):
            victim = await one_of(scheduler, workers, due)
            await asyncio.to_thread(victim.kill)
            victim.start()
            _LOG.info("killed %s, %d of %d are answered", victim.name, len(clients.answers), clients.sent)
    assert len(clients.answers) == clients.sent >= queued
    assert not [(number, answer) for number, answer in clients.answers if answer != expected[number]]

    async with Topics.of(cluster) as topics:
        journal = topics.journal
    assert journal.unreadable == 0
    assert len(journal.outcomes) == len(samples) + clients.sent
    assert len({outcome.request_id for outcome in journal.outcomes}) == len(journal.outcomes)
    assert all(map(completed, journal.outcomes))
    lost = journal.losses
    assert len(lost) == kills
    assert not any(one.unsure for one in lost)
    assert all(1 <= len(one.attempts) <= EXECUTORS * MOST for one in lost), [len(one.attempts) for one in lost]
    losses = Counter(request_id for one in lost for request_id, _ in one.attempts)
    _LOG.info("%d requests, lost under execution: %s", clients.sent, [len(one.attempts) for one in lost])
    alone = scheduler.metric("greenroom_scheduler_events_total", event="placed_alone")
    assert alone == sum(count > 1 for count in losses.values())
    assert scheduler.metric("greenroom_scheduler_events_total", event="worker_lost") == kills
    for worker in workers:
        await asyncio.to_thread(worker.wait_ready)
        assert worker.metric("greenroom_coe_requests_failed_total") == 0
        assert worker.terminate() == 0
    cluster.check_logs()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_worker_killed_between_the_stages_of_its_requests_loses_nothing(cluster: Cluster, board: Board) -> None:
    samples = [sample for sample in board.samples if len(sample.experts) == 2]
    await kill_over_a_queue(cluster, samples, 1, 240, lambda worker: computes(worker, 50) and half_way(worker) > 0)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scheduling",
    [
        pytest.param(["--scheduling", "pull", "--policy", "pull"], id="pull"),
        pytest.param(["--scheduling", "coserve", "--policy", "coserve"], id="coserve"),
    ],
)
async def test_three_kills_over_two_thousand_that_are_queued_and_all_are_served(cluster: Cluster, board: Board) -> None:
    """Each kill finds nearly the whole queue on the workers, and the next one finds what it returned with others."""
    await kill_over_a_queue(cluster, board.samples, 3, 2000, lambda worker: computes(worker, 500))
