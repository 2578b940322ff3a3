"""What this machine is called, for figures that hold on it alone."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """As the system names it."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machine_name() -> str:
    """The processor, and how many of its cores this process may use: what times of computation depend on."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor_name()}, {cores} core{'' if cores == 1 else 's'}"
