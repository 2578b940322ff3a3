"""What deciding costs, beside what is decided about (Fig. 19).

python -m benchmarks.coserve --stage overhead
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.coserve.boards import Task
from benchmarks.coserve.burst import SAMPLE_SEED
from benchmarks.coserve.costs import documented, kept_or_measured
from benchmarks.coserve.line import arriving
from benchmarks.coserve.machines import HERE, MACHINES, Machine
from benchmarks.coserve.settings import Setting, best_setting, candidates, run_with
from benchmarks.coserve.systems import COSERVE, OURS, PULL, Early
from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import interval
from benchmarks.harness.reporting.tables import plus_minus
from greenroom.coe.dispatch.base import Dispatcher, ExpertMemory, Run
from greenroom.coe.simulation.simulate import Served, Way
from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.dependencies import Dependencies
from greenroom.policies.base.events import SequenceEnd
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.placement.placement_policy import Costs, PendingRequest, Shed
from greenroom.profiling.coe.replayed_throughput import Board, Scheme

SCHEMES: Final[Mapping[str, Scheme]] = {"Samba-CoE": Early("lru"), "CoServe": COSERVE, OURS: PULL}
AIMED: Final = ("CoServe", OURS)
LINE_SHARE: Final = 0.8
"""Of what a burst is served with: the rate of the line."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    seeds: int = 5
    machines: tuple[Machine, ...] = (HERE, MACHINES[2])
    requests: int = 3500
    sample: int = 3500
    measured: bool = True


QUICK = Scale(seeds=2, machines=(HERE,), requests=800, sample=300, measured=False)


@dataclass(slots=True)
class Spent:
    """Seconds of this thread's processor time: in all decisions, and in finding room for experts among them."""

    deciding: float = 0.0
    managing: float = 0.0

    def deciding_on(self, call: Callable[[], T]) -> T:
        began = time.thread_time()
        try:
            return call()
        finally:
            self.deciding += time.thread_time() - began


class ClockedMemory(ExpertMemory):
    """A memory, and what bringing experts into it takes: whether there is room, who leaves."""

    def __init__(self, inner: ExpertMemory, spent: Spent) -> None:
        self._inner = inner
        self._spent = spent

    def waits(self, request: PendingRequest) -> None:
        self._inner.waits(request)

    def forget(self, request: PendingRequest, end: SequenceEnd) -> None:
        self._inner.forget(request, end)

    def hold(self, expert: int, requests: Sequence[PendingRequest]) -> None:
        self._inner.hold(expert, requests)

    def release(self, expert: int) -> None:
        self._inner.release(expert)

    def has(self, expert: int) -> bool:
        return self._inner.has(expert)

    def fetch(self, expert: int, *, whoever: bool = True) -> bool:
        began = time.thread_time()
        try:
            return self._inner.fetch(expert, whoever=whoever)
        finally:
            self._spent.managing += time.thread_time() - began

    @property
    def residents(self) -> Keys:
        return self._inner.residents

    @property
    def loading(self) -> int:
        return self._inner.loading


class ClockedDispatcher(Dispatcher):
    """A dispatcher, and what its answers take."""

    def __init__(self, inner: Dispatcher, spent: Spent) -> None:
        self._inner = inner
        self._spent = spent

    def arrived(self, requests: Sequence[PendingRequest], now_ms: float) -> tuple[Shed, ...]:
        return self._spent.deciding_on(lambda: self._inner.arrived(requests, now_ms))

    def finished(self, executor: str, now_ms: float) -> None:
        self._spent.deciding_on(lambda: self._inner.finished(executor, now_ms))

    def next_runs(self, now_ms: float) -> list[Run]:
        return self._spent.deciding_on(lambda: self._inner.next_runs(now_ms))

    def cancel(self, request: PendingRequest) -> bool:
        return self._inner.cancel(request)

    def failed(self, memory: ExpertMemory, expert: int) -> tuple[PendingRequest, ...]:
        return self._inner.failed(memory, expert)

    @property
    def waiting(self) -> int:
        return self._inner.waiting


@dataclass(frozen=True, slots=True)
class Clocked:
    """A scheme whose decisions are timed."""

    scheme: Scheme
    spent: Spent = field(default_factory=Spent)

    @property
    def one_memory(self) -> bool:
        return self.scheme.one_memory

    def make_policy(self, catalogue: Catalogue, dependencies: Dependencies) -> ExpertPolicy:
        return self.scheme.make_policy(catalogue, dependencies)

    def make_dispatcher(
        self, names: Sequence[str], memories: Mapping[str, ExpertMemory], costs: Costs, most: Mapping[int, int]
    ) -> Dispatcher:
        clocked = {id(memory): ClockedMemory(memory, self.spent) for memory in memories.values()}
        own = {name: clocked[id(memory)] for name, memory in memories.items()}
        return ClockedDispatcher(self.scheme.make_dispatcher(names, own, costs, most), self.spent)


def run(scale: Scale) -> dict[str, Any]:
    """``cells``: by machine, how requests come, and system, the processor time of decisions over that of requests."""
    costs = kept_or_measured() if scale.measured else documented()
    cells: list[dict[str, Any]] = []
    with progress(len(scale.machines) * len(SCHEMES) * scale.seeds, "overhead", "replay") as bar:
        for machine in scale.machines:
            sample = machine.board(Task("A", scale.sample, SAMPLE_SEED), costs)
            memory = machine.memory_of(sample)
            for name, scheme in SCHEMES.items():
                setting = best_setting(
                    candidates(sample, memory, (1,) if name == "Samba-CoE" else (1, 2, 3, 4)),
                    lambda own, scheme=scheme: _per_s(run_with(sample, scheme, own, memory)),  # type: ignore[misc]  # noqa: B023
                )
                spent: dict[str, list[dict[str, float]]] = {"burst": [], "line": []}
                for seed in range(scale.seeds):
                    board = machine.board(Task("A", scale.requests, seed), costs)
                    burst, rate = cost_of(board, scheme, setting, memory, None)
                    spent["burst"].append(burst)
                    spent["line"].append(
                        cost_of(board, scheme, setting, memory, arriving(board.paths, LINE_SHARE * rate, seed))[0]
                    )
                    bar.update()
                for comes, runs in spent.items():
                    figures = {figure: interval([one[figure] for one in runs]) for figure in runs[0]}
                    place = {"machine": machine.name, "comes": comes, "system": name, "executors": setting.executors}
                    cells.append({**place, **figures})
    first = [cell for cell in cells if cell["machine"] == scale.machines[0].name and cell["system"] in AIMED]
    return {
        "cells": cells,
        "overhead_share": max(cell["overhead_share"]["mean"] for cell in first),
        "management_share": max(cell["management_share"]["mean"] for cell in first),
    }


def cost_of(
    board: Board, scheme: Scheme, setting: Setting, memory: int, ways: Sequence[Way] | None
) -> tuple[dict[str, float], float]:
    """Of one replay; and the requests a second that it served."""
    clocked = Clocked(scheme)
    served = run_with(board, clocked, setting, memory, ways=ways)
    assert served is not None, "its setting was found to fit"
    requests, stages = len(board.paths), sum(map(len, board.paths))
    spent = clocked.spent
    return {
        "overhead_share": 1000 * spent.deciding / served.computed_ms,
        "management_share": 1000 * spent.managing / served.computed_ms,
        "of_the_time": 1000 * spent.deciding / served.total_ms,
        "us_a_request": 1e6 * spent.deciding / requests,
        "us_a_stage": 1e6 * spent.deciding / stages,
        "request_ms": served.computed_ms / requests,
    }, served.per_s  # fmt: skip


def _per_s(served: Served | None) -> float:
    return 0.0 if served is None else served.per_s


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{'':<46}{'executors':>10}{'us a request':>16}{'computing ms':>14}{'decisions %':>15}{'management %':>15}"
    ]
    for cell in found["cells"]:
        name = f"{cell['machine']}, {cell['comes']}: {cell['system']}"
        lines.append(
            f"{name:<46}{cell['executors']:>10}{plus_minus(cell['us_a_request'], digits=0):>16}"
            f"{cell['request_ms']['mean']:>14.2f}{plus_minus(cell['overhead_share'], 100):>15}"
            f"{plus_minus(cell['management_share'], 100):>15}"
        )
    return "\n".join(
        [
            *lines,
            "of what executors compute; a request's stages together; management is part of decisions (paper: 0.2 %)",
        ]
    )


def draw(found: Mapping[str, Any], path: Path) -> None:
    places = list(dict.fromkeys((cell["machine"], cell["comes"]) for cell in found["cells"]))
    figure, (panel,) = panels_of(1, 1, height=3.2)
    arms = {
        system: [
            next(
                cell for cell in found["cells"] if (cell["machine"], cell["comes"], cell["system"]) == (*place, system)
            )["overhead_share"]
            for place in places
        ]
        for system in SCHEMES
    }
    scaled = {name: [{key: 100 * number for key, number in one.items()} for one in own] for name, own in arms.items()}
    grouped_bars(panel, [f"{machine},\n{comes}" for machine, comes in places], scaled)
    panel.set_ylabel("decisions, % of computing")
    tidy(panel)
    legend_below(figure, [panel])
    save(figure, path)
