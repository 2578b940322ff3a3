"""Runs an arm as a process of its own, if need be in a memory cgroup, and reads its answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.cgroups import MemoryCgroup
from benchmarks.harness.disk import drop_cache
from benchmarks.peers.job import Batch, Decoded

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 420.0
_ERROR_CHARACTERS = 500


class ArmFailed(Exception):
    """An arm gave no answer; the message says why."""


@dataclass(frozen=True)
class Answer:
    """What an arm told, and what was seen of it from outside. Bytes."""

    told: dict[str, Any]
    cgroup_limit: int | None = None
    cgroup_peak: int | None = None
    left_in_cache: int = 0
    """Of its model's files, when it began, though they had been dropped."""

    @property
    def batches(self) -> list[Decoded]:
        return [
            Decoded(tuple(map(tuple, batch["arrivals"])), tuple(map(tuple, batch["greedy"])), batch["read_bytes"])
            for batch in self.told["batches"]
        ]


@dataclass(frozen=True)
class Arm:
    """An engine: the interpreter that has it, and the module that takes its jobs."""

    name: str
    python: str
    module: str

    def run(
        self,
        model: Path,
        batches: Sequence[Batch],
        settings: dict[str, Any],
        *,
        limit_bytes: int | None = None,
        cold: Sequence[Path] = (),
        timeout_s: float = _TIMEOUT_S,
    ) -> Answer:
        """Run a job in a new process. ``cold``: dropped from the page cache first. Raises ArmFailed, NoCgroup."""
        job = {"model": str(model), "batches": [asdict(batch) for batch in batches], "settings": settings}
        command = [self.python, "-m", self.module]
        with ExitStack() as stack:
            group = None if limit_bytes is None else stack.enter_context(MemoryCgroup(limit_bytes))
            left = drop_cache(cold)
            told = _run(command if group is None else group.command(command), job, timeout_s, group)
            return Answer(told, limit_bytes, None if group is None else group.peak_bytes, left)


def greenroom() -> Arm:
    return Arm("greenroom", sys.executable, "benchmarks.peers.greenroom_arm")


def llama_cpp(python: str) -> Arm:
    return Arm("llama.cpp", python, "benchmarks.peers.llama_arm")


def _run(command: Sequence[str], job: dict[str, Any], timeout_s: float, group: MemoryCgroup | None) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    # Weights in huge pages for all: torch's allocations and those of the C library, where llama.cpp's are.
    environment |= {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, env=environment, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise ArmFailed(f"no answer within {timeout_s:.0f} s") from error
    except OSError as error:
        raise ArmFailed(f"could not start {command[0]}: {error.strerror}") from error
    if done.returncode:
        if group is not None and group.killed:
            raise ArmFailed(f"killed by the kernel: it needs more than its cgroup's {group.limit_bytes} bytes")
        raise ArmFailed(f"ended with {done.returncode}: {done.stderr.strip()[-_ERROR_CHARACTERS:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
