"""Nothing lost, nothing twice: processes killed and paused under load, on a real broker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from greenroom.core.generation import FinishReason
from greenroom.demo.tasks import TASKS, samples
from greenroom.v1 import worker_pb2, worker_pb2_grpc
from tests.deploy.image import certificates
from tests.integration.cluster import SESSION_S, Cluster, Security, running
from tests.integration.pipeline.load import Clients, check
from tests.integration.pipeline.topics import Topics, completed
from tests.kafka.broker import Broker
from tests.kafka.small_disk import SmallDisk
from tests.waiting import DEADLINE_S

_LOG = logging.getLogger(__name__)
MODEL = "greenroom-understudy"
MAX_TOKENS = 24
LEASE_S = 3.0


def prompts(distinct: int) -> list[str]:
    return [sample.prompt for task in TASKS for sample in samples(task, distinct // len(TASKS), seed=7)]


async def in_thread(do: Callable[[], object]) -> None:
    await asyncio.to_thread(do)


@dataclass(frozen=True, slots=True)
class Load:
    """At least so many ``requests``, ``rate`` a second, while ``acts`` are done to the cluster, ``every_s`` seconds or
    less apart. ``acts``: empty, all that there are."""

    requests: int
    rate: float
    every_s: float
    acts: frozenset[str] = frozenset()


class Chaos:
    """What is done to the cluster, in a random order at random moments. ``disk``: the broker's, which is filled too."""

    def __init__(self, cluster: Cluster, broker: Broker, load: Load, disk: SmallDisk | None = None) -> None:
        self._cluster = cluster
        self._broker = broker
        self._load = load
        self._disk = disk
        self._random = random.Random(load.requests)
        self.done: list[str] = []
        self.over = False

    def acts(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        disk = self._disk
        filled = [] if disk is None else [("fill the broker's disk", lambda: self._fill(disk)) for _ in range(2)]
        return [
            *filled,
            ("kill a worker", lambda: self._kill("worker0")),
            ("kill the active scheduler", lambda: self._kill(self._active_scheduler())),
            ("kill tasktype", lambda: self._kill("tasktype0")),
            ("kill tasktype between append and commit", self._fault_in_tasktype),
            ("kill the predictor", lambda: self._kill("predictor0")),
            ("kill the broker", self._kill_broker),
            ("pause a worker past its lease", lambda: self._pause("worker1", LEASE_S + 2)),
            (
                "pause the active scheduler past its session",
                lambda: self._pause(self._active_scheduler(), SESSION_S + 4),
            ),
        ]

    async def run(self) -> None:
        chosen = self._load.acts
        acts = [(name, act) for name, act in self.acts() if not chosen or name in chosen]
        assert len(acts) >= len(chosen), "one of them is unknown"
        self._random.shuffle(acts)
        for name, act in acts:
            await asyncio.sleep(self._random.uniform(0.3, 1.0) * self._load.every_s)
            _LOG.info("%s", name)
            await act()
            self.done.append(name)
        self.over = True

    def _active_scheduler(self) -> str:
        held = {
            name: process.log().rfind("claiming it")
            for name, process in self._cluster.processes.items()
            if name.startswith("scheduler")
        }
        # The one that claimed last has the newest line; logs are stamped, so compare the stamps.
        stamps = {name: self._cluster[name].log()[:at].rsplit("\n", 1)[-1] for name, at in held.items() if at >= 0}
        return max(stamps, key=lambda name: stamps[name], default="scheduler0")

    async def _kill(self, name: str) -> None:
        process = self._cluster[name]
        await in_thread(process.kill)
        await asyncio.sleep(self._random.uniform(0, 1))
        await in_thread(process.start)
        await in_thread(process.wait_ready)

    async def _fault_in_tasktype(self) -> None:
        process = self._cluster["tasktype0"]
        await in_thread(process.kill)
        process.start(GREENROOM_FAULT="tasktype:after-append:5")
        await in_thread(process.wait_end)
        await in_thread(process.start)
        await in_thread(process.wait_ready)

    async def _kill_broker(self) -> None:
        await in_thread(self._broker.kill)
        await asyncio.sleep(self._random.uniform(0, 1))
        await in_thread(self._broker.start)

    async def _fill(self, disk: SmallDisk) -> None:
        """The broker ends by itself at the next write. Then there is room again, and it is started."""
        await in_thread(disk.fill)
        await in_thread(self._broker.wait_end)
        await asyncio.sleep(self._random.uniform(0, 1))
        await in_thread(disk.free)
        await in_thread(self._broker.start)

    async def _pause(self, name: str, seconds: float) -> None:
        self._cluster[name].pause()
        await asyncio.sleep(seconds)
        self._cluster[name].resume()
        await in_thread(self._cluster[name].wait_ready)


async def no_call_without_a_certificate(address: str, ca: bytes) -> None:
    """Neither in the clear nor by TLS alone."""
    everything = worker_pb2.ListRunsRequest(epoch=2**62)
    alone = grpc.ssl_channel_credentials(ca)
    named = [("grpc.ssl_target_name_override", certificates.NAME)]
    for channel in (grpc.aio.insecure_channel(address), grpc.aio.secure_channel(address, alone, named)):
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await worker_pb2_grpc.WorkerStub(channel).ListRuns(everything, timeout=DEADLINE_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, refused.value.details()


BRIEF = Load(
    requests=100, rate=4.0, every_s=1.0,
    acts=frozenset({"kill a worker", "kill the active scheduler", "kill the broker", "pause a worker past its lease"}),
)  # fmt: skip
"""A lost worker, a deposed scheduler, a log that is away, a worker that wakes up without a lease: most of the protocol
is for these. Other tests run beside it, and at twice the rate a slow machine would be overloaded from beginning to end:
the longer the broker then takes to come back, the more it would have to do."""
SHORT = Load(requests=300, rate=8.0, every_s=1.5)
LONG = Load(requests=1500, rate=8.0, every_s=8.0)
# The rate is lower, because the broker starts three times, and requests must not wait for it longer than the scheduler
# lets them.
FULL_DISK = Load(requests=200, rate=3.0, every_s=3.0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("load", "secure"),
    [
        pytest.param(BRIEF, True, id="brief, mTLS and SASL"),  # all that plain calls go through is in it too
        pytest.param(SHORT, True, id="short, mTLS and SASL", marks=pytest.mark.full),
        pytest.param(SHORT, False, id="short", marks=pytest.mark.full),
        pytest.param(LONG, True, id="long, mTLS and SASL", marks=pytest.mark.full),
        pytest.param(LONG, False, id="long", marks=pytest.mark.full),
    ],
)
async def test_nothing_is_lost_and_nothing_twice(
    mortal_broker: Broker, prefix: str, cache: Path, tmp_path: Path, load: Load, secure: bool
) -> None:
    security = Security(mortal_broker, tmp_path / "security") if secure else None
    await all_is_answered(mortal_broker, prefix, cache, tmp_path, load, security=security)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_full_disk_loses_nothing(
    broker_on_small_disk: tuple[Broker, SmallDisk], prefix: str, cache: Path, tmp_path: Path
) -> None:
    """The broker ends each time that its disk is full, beside all that else goes wrong."""
    broker, disk = broker_on_small_disk
    await all_is_answered(broker, prefix, cache, tmp_path, FULL_DISK, disk=disk)


async def all_is_answered(
    broker: Broker,
    prefix: str,
    cache: Path,
    folder: Path,
    load: Load,
    *,
    security: Security | None = None,
    disk: SmallDisk | None = None,
) -> None:
    """A cluster answers under chaos as it does without, and each request once."""
    options = {"worker": ["--dtype", "float32", "--expert-memory", "50%", "--max-running", "8"]}
    brokers = broker.address if security is None else broker.secure_address
    cluster = Cluster(
        folder, brokers, prefix=prefix, cache=cache, gateways=2, schedulers=2, workers=2, options=options,
        security=security,
    )  # fmt: skip
    with running(cluster):
        if security is not None:
            ca = (security.identity("worker") / "ca.pem").read_bytes()
            for name in ("worker0", "predictor0", "gateway0"):
                await no_call_without_a_certificate(cluster[name].listens, ca)
        async with Clients(cluster.urls, cluster.grpc_addresses, max_tokens=MAX_TOKENS, model=MODEL) as clients:
            distinct = sorted(set(prompts(30)))
            undisturbed = await clients.poisson(distinct, 20.0, seed=1)
            expected = {call.prompt: call.text for call in undisturbed}
            check(undisturbed, expected)
            chaos = Chaos(cluster, broker, load, disk=disk)
            disturbed, _ = await asyncio.gather(
                clients.poisson(distinct, load.rate, seed=2, enough=lambda sent: chaos.over and sent >= load.requests),
                chaos.run(),
            )
            _LOG.info("did %s; refused and sent again: %d", chaos.done, sum(call.refused for call in disturbed))
            try:
                check(disturbed, expected)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{cluster.logs()}") from None
        async with Topics.of(cluster, broker.address) as topics:
            journal = topics.journal
        assert journal.unreadable == 0
        written = {outcome.request_id: outcome for outcome in reversed(journal.outcomes)}  # the first of each counts
        # What was refused with an unknown acknowledgement may have run as well, and was sent again.
        assert sum(map(completed, written.values())) >= len(disturbed) + len(distinct)
        assert not [outcome for outcome in written.values() if outcome.reason is FinishReason.FAILED]
