"""Memory cgroups (v1 or v2) for the processes of a benchmark.

A cgroup's limit bounds what its processes allocate and the page cache that they fill. So a machine can measure with
less memory than it has. Groups are made beneath this process's own, whose limits then stay in force. A v2 group that
has processes takes no children: there the group is made beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.closing import Closing

_PREFIX = "greenroom-bench"
_EMPTY_WAIT_S = 10.0
_EMPTY_POLL_S = 0.05


class NoCgroup(Exception):
    """A memory cgroup can not be made here; the message is the reason."""


@dataclass(frozen=True)
class _Files:
    """Names of a version's files. ``no_swap``: written after the limit, so that nothing is swapped out instead."""

    version: int
    limit: str
    usage: str
    peak: str
    no_swap: tuple[str, ...]


_V1 = _Files(1, "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", ("memory.swappiness",))
_V2 = _Files(2, "memory.max", "memory.current", "memory.peak", ("memory.swap.max",))


class MemoryCgroup(Closing):
    """A cgroup with a limit on its memory, page cache included; removed on exit. Raises NoCgroup.

    Start a process with ``command`` to have it in the group from its first page on.
    """

    _numbers = itertools.count()

    def __init__(
        self, limit_bytes: int, *, proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup"), trial: bool = True
    ) -> None:
        """``trial`` False does not start a process to see whether it can enter."""
        reasons = []
        for parent, files in _parents(proc, mount):
            group = parent / f"{_PREFIX}-{os.getpid()}-{next(self._numbers)}"
            try:
                _make(group, files, limit_bytes, trial)
            except OSError as error:
                reasons.append(f"{group}: {error.strerror or error}")
                with contextlib.suppress(OSError):
                    group.rmdir()
                continue
            self.path, self.limit_bytes, self._files = group, limit_bytes, files
            return
        raise NoCgroup("; ".join(reasons) or f"{mount} has no memory controller")

    @property
    def version(self) -> int:
        return self._files.version

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs ``command`` within the group, its interpreter's start included."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    @property
    def peak_bytes(self) -> int | None:
        """The most that was charged to the group, page cache included; None where the kernel does not say."""
        return _number(self.path / self._files.peak)

    @property
    def usage_bytes(self) -> int | None:
        return _number(self.path / self._files.usage)

    @property
    def killed(self) -> int:
        """How many of its processes the kernel killed for want of memory."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        return _field(self.path / file, "oom_kill")

    def close(self) -> None:
        """Remove the group. Its processes must have ended; the kernel may take a moment to notice."""
        deadline = time.monotonic() + _EMPTY_WAIT_S
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_EMPTY_POLL_S)


def why_not() -> str | None:
    """None where memory cgroups can be made here, else the reason."""
    try:
        MemoryCgroup(1 << 30).close()
    except NoCgroup as error:
        return str(error)
    return None


def remove_stale(proc: Path = Path("/proc"), mount: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Remove groups that benchmarks left behind whose process is gone; returns them."""
    removed = []
    for parent, _ in _parents(proc, mount):
        for group in parent.glob(f"{_PREFIX}-*-*"):
            owner = group.name.removeprefix(f"{_PREFIX}-").split("-")[0]
            if not (proc / owner).exists():
                with contextlib.suppress(OSError):
                    group.rmdir()
                    removed.append(group)
    return removed


def _parents(proc: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    """Where a group may be made. v1 comes first: a kernel that offers it has the memory controller there."""
    own: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
    if (mount / "memory" / _V1.limit).exists() or (mount / "memory" / "cgroup.procs").exists():
        yield _existing(mount / "memory", own.get("memory", "/")), _V1
        return
    for root in (mount, mount / "unified"):
        if not (root / "cgroup.controllers").exists():
            continue
        group = _existing(root, own.get("", "/"))
        for parent in (group, *group.parents):
            if "memory" in _text(parent / "cgroup.subtree_control").split():
                yield parent, _V2
            if parent == root:
                break


def _existing(root: Path, path: str) -> Path:
    """Within a container the path may be the host's, and the group itself is mounted at the root."""
    group = root / path.lstrip("/")
    return group if group.is_dir() else root


def _make(group: Path, files: _Files, limit_bytes: int, trial: bool) -> None:
    group.mkdir()
    (group / files.limit).write_text(str(limit_bytes))
    for name in files.no_swap:
        with contextlib.suppress(OSError):  # a kernel without swap has no such file
            (group / name).write_text("0")
    if trial:
        enters = ["/bin/sh", "-c", 'echo $$ > "$0"', str(group / "cgroup.procs")]
        done = subprocess.run(enters, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(f"no process can enter it: {done.stderr.strip()}")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> int:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
