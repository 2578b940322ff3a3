"""Replays side by side: they are decisions in Python, a core each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from benchmarks.harness.reporting.progress import each

J = TypeVar("J")
R = TypeVar("R")


def in_parallel(function: Callable[[J], R], jobs: Sequence[J], what: str) -> list[R]:
    """The results in the order of the jobs. Raises what a job raises."""
    workers = min(len(jobs), len(os.sched_getaffinity(0)))
    if workers <= 1:
        return [function(job) for job in each(jobs, what, "job")]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(each(pool.map(function, jobs), what, "job"))
