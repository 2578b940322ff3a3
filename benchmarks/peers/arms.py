"""The engines as child processes: one process a run, in a memory cgroup if it has a limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.children.processes import HUGE_PAGES, Child, ChildSpec
from benchmarks.harness.disk import drop_cache
from benchmarks.peers.batch import Batch, Decoded

_TIMEOUT_S = 420.0
_ENVIRONMENT = {**HUGE_PAGES, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Weights in huge pages for both: torch's allocations, and those of the C library, which has llama.cpp's."""


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
    """An engine: the interpreter that has it, and ``module:Class`` of what decodes with it."""

    name: str
    python: str
    system: str

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
        """Decode in a new process. ``cold``: dropped from the page cache first. ``timeout_s``: to open, and to decode.

        Raises ArmFailed, NoCgroup.
        """
        spec = ChildSpec.of(
            self.system, {"model": str(model), "settings": settings}, limit_bytes=limit_bytes, python=self.python
        )
        left = drop_cache(cold)
        with Child(spec, open_timeout_s=timeout_s, environment=_ENVIRONMENT) as child:
            decoded = child.tell("decode", timeout_s, batches=[asdict(batch) for batch in batches])
            peak = None if child.cgroup is None else child.cgroup.peak_bytes
            return Answer({**child.description, **decoded}, limit_bytes, peak, left)


def greenroom() -> Arm:
    return Arm("greenroom", sys.executable, "benchmarks.peers.forced_greenroom:ForcedGreenroom")


def llama_cpp(python: str) -> Arm:
    return Arm("llama.cpp", python, "benchmarks.peers.forced_llama:ForcedLlama")


def streaming_llama() -> Arm:
    return Arm("BigMoeOnEdge", sys.executable, "benchmarks.peers.streaming_llama:StreamingLlama")
