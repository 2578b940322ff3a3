"""The arms, all running: the engine in a process of its own, and the pipeline behind its HTTP API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness.children.processes import Child, ChildSpec
from benchmarks.harness.machine import cache_folder
from benchmarks.pipeline import http_client
from benchmarks.pipeline.checkouts import Checkout
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

    def __init__(self, model: Path, max_running: int, checkout: Checkout) -> None:
        settings = {"model": str(model), "max_running": max_running}
        spec = ChildSpec.of("benchmarks.pipeline.child_engine:ChildEngine", settings, environment=checkout.environment)
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
    alone, not for its process. ``model``: a checkpoint with the bundled one's tokenizer.
    """

    rounds: int
    seconds: float
    tokens: int
    max_running: int
    overload_seconds: float
    thread_only: bool
    model: Path = field(default_factory=bundled_model_path)


@dataclass(frozen=True)
class Side:
    """One checkout's two arms."""

    checkout: Checkout
    engine: EngineArm
    pipeline: PipelineArm
    cluster: Cluster

    def arms(self) -> list[tuple[Side, str, Arm]]:
        return [(self, "engine", self.engine), (self, "pipeline", self.pipeline)]

    def pids(self) -> dict[str, int]:
        """Of the pipeline's processes, by kind."""
        return {process.name.rstrip("0"): process.pid for process in self.cluster.processes.values()}

    def prefill(self) -> Prefill:
        worker = self.cluster["worker0"]
        return Prefill(
            worker.metric("greenroom_step_rows_total", phase="prefill"),
            worker.metric("greenroom_worker_prefill_rows_for_nothing_total"),
        )


@dataclass(frozen=True, slots=True)
class Prefill:
    """Rows of prompts that a worker has computed so far, and those of them that served nobody."""

    rows: float
    for_nothing: float

    def share_since(self, before: Prefill) -> float:
        """The share for nothing of what came after ``before``."""
        return (self.for_nothing - before.for_nothing) / max(1.0, self.rows - before.rows)


@dataclass(frozen=True)
class Arms:
    """``beside``: another checkout's, where there is one. ``rows``: every round's own figures, by all parts."""

    ours: Side
    beside: Side | None
    broker: JarBroker
    effort: Effort
    texts: Sequence[str] = field(default_factory=lambda: prompts(200))
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def sides(self) -> list[Side]:
        return [self.ours] if self.beside is None else [self.ours, self.beside]

    def in_turn(self, round_: int) -> list[tuple[Side, str, Arm]]:
        """All of them; each round goes the other way."""
        found = self.ours.arms() if self.beside is None else [*self.ours.arms(), *self.beside.arms()[::-1]]
        return found if round_ % 2 else found[::-1]


@contextmanager
def opened(
    broker: JarBroker, folder: Path, effort: Effort, ours: Checkout, beside: Checkout | None = None
) -> Iterator[Arms]:
    """All arms open, each with its engine on core 0 and all else on core 1."""
    with ExitStack() as stack:
        side = _side(stack, broker, folder, "bench.", effort, ours)
        other = None if beside is None else _side(stack, broker, folder / "beside", "beside.", effort, beside)
        arms = Arms(side, other, broker, effort)
        for one in arms.sides:
            _pin(one, effort, closed(arms.texts, 60, effort.tokens))
        for pid in (broker.pid, os.getpid()):
            pin(pid, OTHERS)
        yield arms


def _side(stack: ExitStack, broker: JarBroker, folder: Path, prefix: str, effort: Effort, checkout: Checkout) -> Side:
    options = {
        "worker": [
            *("--model", str(effort.model), "--served-model-name", MODEL),
            *("--max-running", str(effort.max_running), "--cold-start"),
        ],
        "scheduler": ["--max-waiting", "64", "--max-queue-wait", "10"],
    }
    folder.mkdir(exist_ok=True)
    cluster = Cluster(
        folder, broker.address, prefix=prefix, cache=cache_folder(), options=options, environment=checkout.environment
    )
    engine = stack.enter_context(closing(EngineArm(effort.model, effort.max_running, checkout)))
    stack.enter_context(running(cluster))
    return Side(checkout, engine, PipelineArm(cluster.urls[0]), cluster)


def _pin(side: Side, effort: Effort, warm_up: Sequence[Planned]) -> None:
    """Both arms work once, which shows which of their threads is the engine's."""
    others = OTHERS if effort.thread_only else (ENGINE_CORE,)
    worker = side.cluster["worker0"].pid
    for pid, arm in ((side.engine.pid, side.engine), (worker, side.pipeline)):
        before = thread_seconds(pid)
        arm.run(warm_up, at_once=8)
        pin(pid, others, busiest_on=ENGINE_CORE, since=before)
    for pid in side.pids().values():
        if pid != worker:
            pin(pid, OTHERS)
