"""Times of batches, on one executor alone and on several side by side."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Input
from greenroom.core.errors import GreenroomError
from greenroom.experts.pack.layout import ExpertWeights

_BATCH_TIMEOUT_S: Final = 300.0
Times = dict[int, float]
"""By batch size, ms."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An architecture's experts that are measured, and what they are given. ``weights[i]``: of ``experts[i]``."""

    key: str
    experts: tuple[int, ...]
    weights: tuple[ExpertWeights, ...]
    inputs: Sequence[Input]

    def batch(self, size: int) -> list[Input]:
        return list(itertools.islice(itertools.cycle(self.inputs), size))


@dataclass(frozen=True, slots=True)
class TimingPlan:
    """``largest``: batch. A size at which a batch takes ``most_ms`` is the last. ``repeats``: batches a turn."""

    largest: int = 64
    rounds: int = 7
    repeats: int = 2
    most_ms: float = 2000.0


def threads_of(cores: int, executors: int) -> int:
    """Of each executor: they share the cores."""
    return max(1, cores // executors)


def warm_up(computer: ExpertComputer, subject: Subject, plan: TimingPlan) -> list[int]:
    """Computes each batch size once, and returns those that will be measured: 1, 2, 4, …

    Raises what is wrong with the expert or with an input.
    """
    sizes, size = [], 1
    while size <= plan.largest:
        sizes.append(size)
        if _timed(computer, subject, 0, size) * 1000 >= plan.most_ms:
            break
        size *= 2
    return sizes


class SideBySide:
    """So many executors as threads, each with its own computer and its share of the cores.

    Torch's number of threads is the process's, so it is set for as long as this is open, and then as it was.
    """

    def __init__(self, computers: Sequence[ExpertComputer], threads: int) -> None:
        self._computers = computers
        self._threads = threads
        self._before = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(len(computers), "profiled executor")

    def __enter__(self) -> SideBySide:
        torch.set_num_threads(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        torch.set_num_threads(self._before)

    def batch_ms(self, subject: Subject, size: int, repeats: int) -> float:
        """The median of what a batch takes on each of them, while all compute batches of this size."""
        ready = threading.Barrier(len(self._computers))

        def work(place: int) -> list[float]:
            torch.set_num_threads(self._threads)  # OpenMP keeps a number for every thread
            ready.wait(_BATCH_TIMEOUT_S)
            return [_timed(self._computers[place], subject, place, size) for _ in range(repeats)]

        futures = [self._pool.submit(work, place) for place in range(len(self._computers))]
        return 1000 * statistics.median(seconds for future in futures for seconds in future.result())


def measure_times(
    computers: Sequence[ExpertComputer],
    subjects: Sequence[Subject],
    sizes: Callable[[str], Sequence[int]],
    counts: Sequence[int],
    threads: Callable[[int], int],
    plan: TimingPlan,
    done: Callable[[], object],
) -> dict[str, dict[int, Times]]:
    """By architecture and number of executors, the median over rounds. ``computers``: as many as the largest count.

    In each round every architecture, number and size has a turn, so other load on the machine hits all alike. ``done``
    is called after each turn.
    """
    found: dict[str, dict[int, dict[int, list[float]]]] = {
        subject.key: {count: {size: [] for size in sizes(subject.key)} for count in counts} for subject in subjects
    }
    for _ in range(plan.rounds):
        for count in counts:
            with SideBySide(computers[:count], threads(count)) as executors:
                for subject in subjects:
                    for size, own in found[subject.key][count].items():
                        own.append(executors.batch_ms(subject, size, plan.repeats))
                        done()
    return {
        key: {count: {size: statistics.median(own) for size, own in by_size.items()} for count, by_size in one.items()}
        for key, one in found.items()
    }


def _timed(computer: ExpertComputer, subject: Subject, place: int, size: int) -> float:
    """Seconds of a batch on the executor at this place, from inputs as they come to results."""
    at = place % len(subject.experts)
    batch = subject.batch(size)
    begin = time.perf_counter()
    outcomes = computer.compute(subject.experts[at], batch, subject.weights[at])
    seconds = time.perf_counter() - begin
    for outcome in outcomes:
        if isinstance(outcome, GreenroomError):
            raise outcome
    return seconds
