"""How much memory this process may really use: the machine's, less what others use, within its control groups.

torch is imported only where a GPU is asked: a wrong configuration is refused without waiting for the import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. ``limit``: the most there can ever be. ``available``: what is free now. ``source``: what set the limit."""

    limit: int
    available: int
    source: str


def memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """The tightest of the machine and every control group (v1 or v2) that this process is in."""
    machine = psutil.virtual_memory()
    tightest = Memory(machine.total, machine.available, "the machine")
    for folder, limit_file, usage_file in _groups(proc, cgroups):
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None or limit >= machine.total:
            continue
        free = max(0, limit - usage + _reclaimable(folder / "memory.stat"))
        tightest = Memory(
            min(tightest.limit, limit),
            min(tightest.available, free),
            "its control group" if limit < tightest.limit else tightest.source,
        )
    return tightest


def gpu_memory(device: torch.device) -> Memory:
    """Of a CUDA device, less what this and other processes use of it."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free, "the GPU")


def resident_bytes() -> int:
    """Memory that this process occupies now."""
    return int(psutil.Process().memory_info().rss)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    """Every group that this process is in, with its parents, and the names of the group's two files."""
    found = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = root / path.lstrip("/")
        # Within a container the path may be the host's, and the group itself is mounted at the root.
        found += [(folder, *files) for folder in (group, *group.parents) if folder == root or root in folder.parents]
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel gives up before it refuses memory."""
    try:
        fields = dict(line.split(None, 1) for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
