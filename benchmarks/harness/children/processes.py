"""The driver's side of the child processes: start, tell, wait with a deadline, end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.children.cgroups import MemoryCgroup, NoCgroup
from benchmarks.harness.closing import Closing

ROOT = Path(__file__).resolve().parents[3]
END_TIMEOUT_S = 30.0
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch's weights in huge pages, as greenroom's arena is."""
_ERROR_CHARACTERS = 600


class ArmFailed(Exception):
    """A child could not do what it was told; the message says why."""


@dataclass(frozen=True)
class ChildSpec:
    """One process: a system of ``child.SYSTEMS`` and its settings. Equal specifications are one process.

    ``settings`` are JSON. ``limit_bytes``: of its memory cgroup. ``name`` tells apart what would else be one process.
    ``python``: its interpreter, which need not have greenroom. ``environment``: variables beside this process's.
    """

    system: str
    settings: str
    limit_bytes: int | None = None
    name: str = ""
    python: str = sys.executable
    environment: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        system: str,
        settings: Mapping[str, Any],
        *,
        limit_bytes: int | None = None,
        name: str = "",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> ChildSpec:
        variables = tuple(sorted((environment or {}).items()))
        return cls(system, json.dumps(settings, sort_keys=True), limit_bytes, name, python, variables)


class Child(Closing):
    """A running child. Every wait has a deadline; a child that misses it is killed."""

    def __init__(self, spec: ChildSpec, *, open_timeout_s: float, environment: Mapping[str, str] = HUGE_PAGES) -> None:
        """Raises ArmFailed where it can not be opened, NoCgroup where its group can not be made."""
        self.spec = spec
        self.cgroup = None if spec.limit_bytes is None else MemoryCgroup(spec.limit_bytes)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._pending = b""
        read, write = os.pipe()
        self._replies = read
        specification = json.dumps({"system": spec.system, "settings": json.loads(spec.settings)})
        command = [spec.python, "-m", "benchmarks.harness.children.child", specification, str(write)]
        if self.cgroup is not None:
            command = self.cgroup.command(command)
        try:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors,
                pass_fds=(write,), env=_environment({**environment, **dict(spec.environment)}),
            )  # fmt: skip
        except OSError as error:
            self._discard()
            raise ArmFailed(f"could not start: {error}") from error
        finally:
            os.close(write)
        try:
            self.description: dict[str, Any] = self._answer(open_timeout_s)
        except BaseException:
            self.close()
            raise

    def tell(self, action: str, timeout_s: float, **arguments: Any) -> Any:
        """Have the child do something; returns its answer. Raises ArmFailed."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"do": action, **arguments}).encode() + b"\n")
            stdin.flush()
        except OSError:
            raise ArmFailed(self._why_it_ended()) from None
        return self._answer(timeout_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, by force if need be, and remove its group."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._discard()

    def _discard(self) -> None:
        os.close(self._replies)
        self._errors.close()
        if self.cgroup is not None:
            self.cgroup.close()

    def _answer(self, timeout_s: float) -> Any:
        line = self._read_line(time.monotonic() + timeout_s)
        if line is None:
            self._process.kill()
            raise ArmFailed(f"no answer within {timeout_s:.0f} s")
        if not line:
            raise ArmFailed(self._why_it_ended())
        message = json.loads(line)
        if "error" in message:
            raise ArmFailed(f"{message['kind']}: {message['error']}"[:_ERROR_CHARACTERS])
        return message["ok"]

    def _read_line(self, deadline: float) -> bytes | None:
        """One line; empty where the child closed its end, None where the time ran out."""
        while b"\n" not in self._pending:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._replies], [], [], left)[0]:
                return None
            read = os.read(self._replies, 1 << 16)
            if not read:
                return b""
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _why_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        if self.cgroup is not None and self.cgroup.killed:
            return f"killed by the kernel: it needs more than its cgroup's {self.cgroup.limit_bytes} bytes"
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        return f"ended with {self._process.returncode}: {text[-_ERROR_CHARACTERS:]}"


class Children(Closing):
    """The children that are open, one a specification; all end with it."""

    def __init__(self, *, open_timeout_s: float = 600.0) -> None:
        self._open: dict[ChildSpec, Child] = {}
        self._failed: dict[ChildSpec, str] = {}
        self._open_timeout_s = open_timeout_s

    def get(self, spec: ChildSpec) -> Child:
        """The child, started at first use. One that failed to open raises ArmFailed at every call."""
        if spec in self._failed:
            raise ArmFailed(self._failed[spec])
        if spec not in self._open:
            try:
                self._open[spec] = Child(spec, open_timeout_s=self._open_timeout_s)
            except (ArmFailed, NoCgroup) as error:
                self._failed[spec] = str(error)
                raise ArmFailed(str(error)) from error
        return self._open[spec]

    def opened(self, spec: ChildSpec) -> Child | None:
        """The child, if it is open."""
        return self._open.get(spec)

    def give_up(self, spec: ChildSpec, why: str) -> None:
        """It failed: end it, and remember."""
        self._failed[spec] = why
        if spec in self._open:
            self._open.pop(spec).close()

    def close_all_but(self, kept: Collection[ChildSpec] = ()) -> None:
        for spec in [spec for spec in self._open if spec not in kept]:
            self._open.pop(spec).close()

    def close(self) -> None:
        self.close_all_but()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path, **more}


def exit_on_sigterm() -> None:
    """SIGTERM then ends the benchmark as an error does: children, cgroups and temporary folders go with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def background(module: str, *arguments: str) -> Iterator[int]:
    """Run a module of ours meanwhile, silently; yields its process id. It is killed at the end."""
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait(END_TIMEOUT_S)
