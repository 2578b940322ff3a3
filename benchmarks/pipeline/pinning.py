"""The engine on one core, everything else on the others, whichever process it is in."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil


def thread_seconds(pid: int) -> dict[int, float]:
    """Processor time of each thread of a process."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        seconds[int(task.name)] = (int(fields[11]) + int(fields[12])) / ticks
    return seconds


def pin(
    pid: int, cores: Iterable[int], *, busiest_on: int | None = None, since: dict[int, float] | None = None
) -> None:
    """All threads of ``pid`` onto ``cores``; the one that worked most since ``since`` onto ``busiest_on``."""
    before = since or {}
    worked = {thread: spent - before.get(thread, 0.0) for thread, spent in thread_seconds(pid).items()}
    busiest = max(worked, key=lambda thread: worked[thread]) if busiest_on is not None else None
    for thread in worked:
        try:
            os.sched_setaffinity(thread, {busiest_on} if thread == busiest and busiest_on is not None else set(cores))
        except ProcessLookupError:
            continue


def cpu_seconds(pid: int) -> float:
    """Processor time of a process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def resident_bytes(pids: Iterable[int]) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)
