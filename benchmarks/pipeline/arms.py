"""The two arms, both running: the engine in a process of its own, and the pipeline behind its HTTP API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.children.processes import Child, ChildSpec
from benchmarks.harness.machine import cache_folder
from benchmarks.pipeline import http_client
from benchmarks.pipeline.pinning import pin, thread_seconds
from benchmarks.pipeline.schedule import Measured, Planned, closed, prompts
from benchmarks.pipeline.stub_worker import MODEL
from greenroom.demo import bundled_model_path
from tests.integration.cluster import Cluster, running
from tests.kafka.broker import JarBroker

ENGINE_CORE, OTHERS = 0, (1,)
OPEN_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 1800.0


class Arm(Protocol):
    def run(self, plan: Sequence[Planned], at_once: int = 0) -> list[Measured]:
        """``at_once`` 0: as planned, however many requests that makes."""
        ...


class EngineArm:
    """The engine in a child process, ended by ``close``."""

    def __init__(self, max_running: int) -> None:
        settings = {"model": str(bundled_model_path()), "max_running": max_running}
        spec = ChildSpec.of("benchmarks.pipeline.child_engine:ChildEngine", settings)
        # Its memory and threads are as those of the pipeline's worker.
        self._child = Child(spec, open_timeout_s=OPEN_TIMEOUT_S, environment={"OMP_NUM_THREADS": "1"})
        self.pid = self._child.pid

    def run(self, plan: Sequence[Planned], at_once: int = 0) -> list[Measured]:
        asked = [[one.at, one.prompt, one.tokens] for one in plan]
        return [Measured(*row) for row in self._child.tell("run", RUN_TIMEOUT_S, plan=asked, at_once=at_once)]

    def close(self) -> None:
        self._child.close()


@dataclass(frozen=True)
class PipelineArm:
    """A running pipeline behind the gateway at ``url``."""

    url: str

    def run(self, plan: Sequence[Planned], at_once: int = 0) -> list[Measured]:
        return asyncio.run(http_client.run(self.url, MODEL, plan, at_once=at_once))


@dataclass(frozen=True, kw_only=True)
class Effort:
    """``rounds`` of each comparison, of ``seconds`` for each arm; ``tokens`` generated for each request.

    ``max_running``: requests that generate at once, in both arms. ``thread_only``: core 0 is for the engine's thread
    alone, not for its process.
    """

    rounds: int
    seconds: float
    tokens: int
    max_running: int
    overload_seconds: float
    thread_only: bool


@dataclass(frozen=True)
class BothArms:
    """``rows``: every round's own figures, by all parts."""

    engine: EngineArm
    pipeline: PipelineArm
    cluster: Cluster
    broker: JarBroker
    effort: Effort
    texts: Sequence[str] = field(default_factory=lambda: prompts(200))
    rows: list[dict[str, Any]] = field(default_factory=list)

    def arms(self, round_: int) -> list[tuple[str, Arm]]:
        """Both by name; each round begins with the other one."""
        found: list[tuple[str, Arm]] = [("engine", self.engine), ("pipeline", self.pipeline)]
        return found if round_ % 2 else found[::-1]


@contextmanager
def opened(broker: JarBroker, folder: Path, effort: Effort) -> Iterator[BothArms]:
    """Both arms open, each with its engine on core 0 and all else on core 1."""
    options = {
        "worker": ["--max-running", str(effort.max_running), "--cold-start"],
        "scheduler": ["--max-waiting", "64", "--max-queue-wait", "10"],
    }
    cluster = Cluster(folder, broker.address, prefix="bench.", cache=cache_folder(), options=options)
    with closing(EngineArm(effort.max_running)) as engine, running(cluster):
        both = BothArms(engine, PipelineArm(cluster.urls[0]), cluster, broker, effort)
        _pin_all(both, closed(both.texts, 60, effort.tokens))
        yield both


def _pin_all(both: BothArms, warm_up: Sequence[Planned]) -> None:
    """Both arms work once, which shows which of their threads is the engine's."""
    others = OTHERS if both.effort.thread_only else (ENGINE_CORE,)
    worker = both.cluster["worker0"].pid
    for pid, arm in ((both.engine.pid, both.engine), (worker, both.pipeline)):
        before = thread_seconds(pid)
        arm.run(warm_up, at_once=8)
        pin(pid, others, busiest_on=ENGINE_CORE, since=before)
    services = [process.pid for process in both.cluster.processes.values() if process.pid != worker]
    for pid in (*services, both.broker.pid, os.getpid()):
        pin(pid, OTHERS)
