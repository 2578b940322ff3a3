"""What this process has in memory and has read, from /proc. Standard library only: every arm's environment has it."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path


def at_rest() -> int:
    """Give back what was freed, else what is allocated next lies in pages that the process still has and no peak shows
    it. Forget the peak, and return the resident set."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    return memory()["rss"]


def reset_peak() -> None:
    """Forget the peak of this process's resident set, where the kernel allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The largest resident set since ``reset_peak``, or since the start."""
    return memory()["peak_rss"]


def peak_bytes_of(process: int) -> int:
    """The largest resident set of another process so far; 0 once it has ended."""
    try:
        return _fields(Path(f"/proc/{process}/status")).get("VmHWM", 0) * 1024
    except OSError:
        return 0


def anonymous_bytes_of(process: int) -> int:
    """What another process has allocated and touched; 0 once it has ended."""
    try:
        return _fields(Path(f"/proc/{process}/status")).get("RssAnon", 0) * 1024
    except OSError:
        return 0


def read_bytes() -> int:
    """What this process has had read from block devices, page faults and their read-ahead included."""
    return _fields(Path("/proc/self/io"))["read_bytes"]


def memory() -> dict[str, int]:
    """Bytes: ``peak`` and current resident set, and its anonymous and file-backed parts."""
    fields = _fields(Path("/proc/self/status"))
    names = {"peak_rss": "VmHWM", "rss": "VmRSS", "rss_anonymous": "RssAnon", "rss_file": "RssFile"}
    return {name: fields[field] * 1024 for name, field in names.items()}


def mapped_bytes(file: Path) -> int:
    """How much of this process's resident set is the file, mapped."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            inside = rest.rstrip().endswith(str(file))
        elif inside and first == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of ``name: number`` lines."""
    pairs = (line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
    words = {name: value.split() for name, value in pairs}
    return {name: int(value[0]) for name, value in words.items() if value and value[0].isdigit()}
