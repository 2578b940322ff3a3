"""Simulated schedulers over loads from far below to far above saturation: the same requests for each, several seeds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.emoe.scheduling.jobs import (
    SLO_MULTIPLES,
    AzureTraffic,
    Job,
    Population,
    poisson,
    with_slos,
    with_wrong_labels,
    without_labels,
)
from benchmarks.emoe.scheduling.measures import summary
from benchmarks.emoe.scheduling.schedulers import ARMS, EMOE, FCFS, HINDSIGHT, estimates
from benchmarks.emoe.scheduling.simulator import Machine, Served, simulate
from benchmarks.harness.reporting.statistics import geometric, interval, over_seeds
from greenroom.policies.placement.fcfs import FcfsPlacement
from greenroom.replay.sweeps.processes import in_processes

TASKS, AZURE = "tasks", "azure"
"""Traffic: Poisson arrivals of the five task types, and recorded arrivals with recorded lengths."""

AT_SATURATION = 1.0
LABEL_ARM, AGNOSTIC = EMOE, "emoe, no labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is simulated. ``loads``: arrival rates in shares of the saturating one.

    At saturation there are ``times_at_saturation`` as many seeds: there the queue of FCFS is a random walk, and its
    goodput differs most from seed to seed.
    """

    seeds: int = 8
    times_at_saturation: int = 3
    requests: int = 600
    loads: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5)
    azure_loads: tuple[float, ...] = (0.5, 0.75, 1.0, 1.25)
    azure_requests: int = 400
    label_load: float = 0.7
    label_accuracies: tuple[float, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
    saturating_requests: int = 400


QUICK = Scale(
    seeds=3, times_at_saturation=1, requests=100, loads=(0.5, 1.0, 1.5), azure_loads=(1.0,), azure_requests=60,
    label_accuracies=(1.0, 0.5, 0.0), saturating_requests=120,
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """A kind of requests and what a machine makes of them: the time of a task alone, and the saturating rate."""

    name: str
    population: Population
    azure: AzureTraffic | None
    machine: Machine
    alone_ms: Mapping[str, float]
    saturation: float

    @classmethod
    def of(cls, name: str, population: Population, azure: AzureTraffic | None, machine: Machine, count: int) -> Traffic:
        traffic = cls(name, population, azure, machine, {}, 1.0)
        alone = {task: traffic._alone(task) for task in population.tasks}
        return replace(traffic, alone_ms=alone, saturation=traffic._saturation(count))

    def jobs(self, rate: float, count: int, seed: int) -> list[Job]:
        if self.azure is not None:
            return self.azure.jobs(rate, count, seed)
        return poisson(self.population, rate, count, seed)

    def with_slos(self, jobs: Sequence[Job], seed: int) -> list[Job]:
        return with_slos(jobs, self.alone_ms, seed)

    def expected(self, job: Job) -> float:
        """Mean answer of its label, over all where it has none: what a profile says."""
        return self.population.mean_output(job.label)

    def _alone(self, task: str) -> float:
        """Milliseconds of a request of mean lengths that runs alone."""
        tokens = round(self.population.mean_input(task)), max(1, round(self.population.mean_output(task)))
        job = Job("alone", task, 0.0, *tokens, max(self.population.max_tokens, tokens[1]), label=task)
        (served,) = simulate([job], FcfsPlacement(), self.machine, self.expected)
        assert served.end_ms is not None
        return served.end_ms

    def _saturation(self, count: int) -> float:
        """Requests a second of first come first served with a queue that never empties."""
        patient = replace(self.machine, max_waiting=10 * count, max_queue_wait_ms=1e12, timeout_ms=1e12, tick_ms=1e9)
        jobs = [replace(job, at_ms=0.0) for job in self.jobs(1.0, count, seed=0)]
        served = simulate(jobs, FcfsPlacement(), patient, self.expected)
        return count / max(one.end_ms or 0.0 for one in served) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One simulated run. ``load``: the arrival rate in shares of the saturating one."""

    traffic: str
    arm: str
    load: float
    seed: int
    requests: int
    label_accuracy: float | None = None
    """Labels are corrupted to this accuracy; None: they are right."""
    labels: bool = True


def points(scale: Scale, traffics: Sequence[str], arms: Sequence[str] = tuple(ARMS)) -> list[Point]:
    """All runs, seed by seed: a sweep that is stopped early is complete for its first seeds."""
    found: list[Point] = []
    common: dict[str, Any]
    for seed in range(scale.seeds * scale.times_at_saturation):
        if seed >= scale.seeds:
            common = {"load": AT_SATURATION, "seed": seed, "requests": scale.requests}
            found += [Point(traffic=TASKS, arm=arm, **common) for arm in arms if TASKS in traffics]
            continue
        for traffic in traffics:
            azure = traffic == AZURE
            for load in scale.azure_loads if azure else scale.loads:
                requests = scale.azure_requests if azure else scale.requests
                found += [Point(traffic=traffic, arm=arm, load=load, seed=seed, requests=requests) for arm in arms]
        if TASKS in traffics:
            common = {"traffic": TASKS, "load": scale.label_load, "seed": seed}
            common["requests"] = scale.requests
            found += [Point(arm=LABEL_ARM, label_accuracy=share, **common) for share in scale.label_accuracies]
            found.append(Point(arm=EMOE, labels=False, **common))
    return found


def run_point(traffics: Mapping[str, Traffic], point: Point, go_on: Callable[[], None]) -> dict[str, Any]:
    go_on()
    traffic, arm = traffics[point.traffic], ARMS[point.arm]
    served = serve(traffic, point)
    found = summary(served)
    found["by_multiple"] = {
        f"{multiple:g}": _share_in_time([one for one in served if _multiple(one, traffic) == multiple])
        for multiple in SLO_MULTIPLES
    }
    return {"arm": arm.name, "traffic": point.traffic, "load": point.load, "seed": point.seed,
            "label_accuracy": point.label_accuracy, "labels": point.labels, **found}  # fmt: skip


def serve(traffic: Traffic, point: Point) -> list[Served]:
    """What became of the point's requests."""
    jobs = traffic.with_slos(traffic.jobs(point.load * traffic.saturation, point.requests, point.seed), point.seed)
    if point.label_accuracy is not None:
        jobs = with_wrong_labels(jobs, point.label_accuracy, point.seed)
    if not point.labels:
        jobs = without_labels(jobs)
    arm = ARMS[point.arm]
    return simulate(jobs, arm.create(), arm.machine(traffic.machine), traffic.expected, estimates)


def _share_in_time(served: Sequence[Served]) -> float:
    return sum(one.in_time for one in served) / len(served) if served else 0.0


def _multiple(one: Served, traffic: Traffic) -> float:
    return round((one.job.slo_e2e_ms or 0.0) / traffic.alone_ms[one.job.task], 6)


def run_all(
    traffics: Sequence[Traffic], scale: Scale, finished: Callable[[], object], *, processes: int | None = None
) -> list[dict[str, Any]]:
    """A row for each point, in the order of ``points``."""
    wanted = points(scale, [traffic.name for traffic in traffics])
    work = partial(run_point, {traffic.name: traffic for traffic in traffics})
    if processes == 0:
        return [_told(work(point, lambda: None), finished) for point in wanted]
    return in_processes(work, wanted, processes or len(os.sched_getaffinity(0)), finished)


def _told(row: dict[str, Any], finished: Callable[[], object]) -> dict[str, Any]:
    finished()
    return row


# -- figures -------------------------------------------------------------------------------------------------------


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The rows by traffic, load and arm as intervals over seeds, and the figures with aims."""
    found: dict[str, Any] = {"sweeps": {}, "labels": _labels(rows)}
    plain = [row for row in rows if row["label_accuracy"] is None and row["labels"]]
    for traffic in dict.fromkeys(row["traffic"] for row in plain):
        own = [row for row in plain if row["traffic"] == traffic]
        loads = sorted({row["load"] for row in own})
        by_load = {load: _by_arm([row for row in own if row["load"] == load]) for load in loads}
        found["sweeps"][traffic] = [
            {"load": load, "arms": {arm: over_seeds(runs) for arm, runs in arms.items()}, **_compared(arms)}
            for load, arms in by_load.items()
        ]  # fmt: skip
    main = found["sweeps"].get(TASKS, [])
    at = next((step for step in main if step["load"] == AT_SATURATION), None)
    gained = None if at is None else at["goodput_ratio_fcfs"]
    found["goodput_ratio_fcfs"] = None if gained is None else round(gained["mean"], 4)
    found["goodput_ratio_fcfs_interval"] = (
        None if gained is None else [round(gained[end], 4) for end in ("low", "high")]
    )
    found["hindsight_share"] = None if at is None else _rounded(at["hindsight_share"])
    found["never_below_fcfs"] = all(step["not_below_fcfs"] for step in main) if main else None
    found["estimate_errors"] = None if at is None else at["arms"][EMOE]["estimates"]
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _by_arm(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: int(row["seed"])):
        found.setdefault(row["arm"], []).append(row)
    return found


def _compared(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """eMoE beside FCFS on the same seeds. ``not_below_fcfs``: by no more than the interval of the difference.

    ``ratios_fcfs``: every arm's goodput over that of FCFS.
    """
    goodput = {arm: [run["goodput"] for run in runs] for arm, runs in arms.items()}
    ours, theirs, best = (goodput.get(name, []) for name in (EMOE, FCFS, HINDSIGHT))
    if not ours or not theirs:
        return {"goodput_ratio_fcfs": None, "hindsight_share": None, "not_below_fcfs": None, "ratios_fcfs": {}}
    gained = interval([a - b for a, b in zip(ours, theirs, strict=True)])
    way = sum(best) - sum(theirs)
    return {
        "goodput_ratio_fcfs": geometric(ours, theirs),
        "ratios_fcfs": {arm: geometric(own, theirs) for arm, own in goodput.items() if arm != FCFS},
        "goodput_gained": gained,
        "not_below_fcfs": gained["mean"] + gained["within"] >= 0,
        "hindsight_share": (sum(ours) - sum(theirs)) / way if best and way > 0 else None,
    }


def _labels(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fig. 19: mean latency by the labels' accuracy, in percent over right labels, seed by seed, and without labels.

    Fig. 13: both by task type.
    """
    corrupted = [row for row in rows if row["label_accuracy"] is not None]
    right = {row["seed"]: row["mean_latency_ms"] for row in corrupted if row["label_accuracy"] == 1.0}
    found = []
    for share in sorted({row["label_accuracy"] for row in corrupted}, reverse=True):
        own = [row for row in corrupted if row["label_accuracy"] == share]
        found.append({"accuracy": share, **over_seeds([_against(row, right) for row in own])})
    without = [_against(row, right) for row in rows if not row["labels"] and row["seed"] in right]
    return {"by_accuracy": found, "without_labels": over_seeds(without) if without else None}


def _against(row: Mapping[str, Any], right: Mapping[int, float]) -> dict[str, Any]:
    return {
        "mean_latency_ms": row["mean_latency_ms"],
        "goodput": row["goodput"],
        "latency_change_percent": 100 * (row["mean_latency_ms"] / right[row["seed"]] - 1),
        "by_task": row["by_task"],
    }
