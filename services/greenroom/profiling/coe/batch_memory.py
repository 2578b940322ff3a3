"""Bytes that batches take while they are computed, held against the process's own peak."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.intermediates import intermediate_bytes
from greenroom.core.units import KIB
from greenroom.profiling.coe.batch_timing import Subject

_RESET_PEAK: Final = "5"
"""What makes the kernel forget the peak (proc(5), /proc/pid/clear_refs)."""


def measure_bytes(
    computer: ExpertComputer, subject: Subject, sizes: Sequence[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """By batch size: the bytes of intermediates, which never shrink; and by how much the process's peak grew.

    The estimate knows torch's tensors, the peak what libraries take beside them. The larger one counts. The second is
    empty where the system does not tell.
    """
    estimated = {
        size: intermediate_bytes(computer, subject.experts[0], subject.batch(size), subject.weights[0])
        for size in sizes
    }
    peaks: dict[int, int] = {}
    for size in sizes:
        grown = peak_growth(computer, subject, size)
        if grown is not None:
            peaks[size] = grown
    return never_shrinking({size: max(own, peaks.get(size, 0)) for size, own in estimated.items()}), peaks


def never_shrinking(by_size: Mapping[int, int]) -> dict[int, int]:
    """Each at least what a smaller batch takes: one that needs less was measured wrong."""
    found: dict[int, int] = {}
    most = 0
    for size in sorted(by_size):
        found[size] = most = max(most, by_size[size])
    return found


def peak_growth(computer: ExpertComputer, subject: Subject, size: int, proc: Path = Path("/proc/self")) -> int | None:
    """By how many bytes computing a batch raises the process's peak above what it occupied before.

    None: the system does not tell.
    """
    batch = subject.batch(size)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed and kept would be used again, unseen
        (proc / "clear_refs").write_text(_RESET_PEAK)
        before = _status(proc, "VmRSS")
        computer.compute(subject.experts[0], batch, subject.weights[0])
        return max(0, _status(proc, "VmHWM") - before)
    except (OSError, AttributeError, LookupError):
        return None


def _status(proc: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB", (proc / "status").read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(name)
    return int(found[1]) * KIB
