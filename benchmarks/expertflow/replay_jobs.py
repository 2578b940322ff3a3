"""Replays as jobs of processes side by side, on the clock and without one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.expertflow.arms import Arm
from benchmarks.expertflow.routings import opened
from greenroom.core.units import MIB
from greenroom.replay.hit_rates import optimum, replay
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay

EXPERT_BYTES: Final = 12 * MIB
RECALL: Final = 0.75
"""Of routers run ahead."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A link, in GB/s, and how many milliseconds a layer of a step with one row computes: half of them before its
    experts, the rest in equal parts by its top-k experts."""

    link_gb_s: float
    layer_ms: float

    @property
    def name(self) -> str:
        return f"{self.link_gb_s:g} GB/s, {self.layer_ms:g} ms"

    def link(self) -> LinkProfile:
        return LinkProfile(self.link_gb_s * 1e9)

    def compute(self, top_k: int) -> ComputeProfile:
        half = self.layer_ms / 2e3
        return ComputeProfile(layer_s=half, expert_s=half / top_k)


MACHINES: Final = (Machine(2, 0.5), Machine(6, 0.5), Machine(6, 2), Machine(20, 1))


@dataclass(frozen=True, slots=True)
class Job:
    """``folder``: see ``in_folder``. ``rows``: of the measured sequences, ``at_once`` of which run in each step.
    ``share``: of the experts that fit. ``seed``: of the routers' mistakes."""

    folder: Path
    arm: Arm
    machine: Machine
    at_once: int
    share: float
    rows: int
    seed: int = 0


def timed(job: Job) -> dict[str, Any]:
    """What a timed replay finds: milliseconds and MiB are of a row."""
    trace, files = opened(job.folder)
    setup = TimedReplay(
        trace, EXPERT_BYTES, job.machine.link(), job.machine.compute(int(trace.experts.shape[2])),
        recall=RECALL if job.arm.router else None, graded=True, seed=job.seed, paths=job.arm.paths(files),
    )  # fmt: skip
    policy = job.arm.made(setup.catalogue(), files)
    slots = round(job.share * policy.catalogue.size)
    found = setup.run(policy, trace.steps(concurrent=job.at_once, tokens=job.rows), slots)
    return {
        "arm": job.arm.name,
        "machine": job.machine.name,
        "at_once": job.at_once,
        "share": job.share,
        "seed": job.seed,
        "slots": slots,
        "rows": found.tokens,
        "ready_rate": found.hit_rate,
        "stall_ms": 1e3 * found.stall_seconds / found.tokens,
        "ms": 1e3 * found.seconds / found.tokens,
        "mib": found.bytes_moved / found.tokens / MIB,
        "prefetches": found.prefetches / found.tokens,
        "prefetches_used": found.prefetches_used / found.tokens,
    }


def untimed(job: Job) -> dict[str, Any]:
    """How much is there when it is asked for where nothing is fetched ahead and time stands still."""
    trace, files = opened(job.folder)
    catalogue = trace.catalogue()
    slots = round(job.share * catalogue.size)
    steps = trace.steps(concurrent=job.at_once, tokens=job.rows)
    if job.arm.policy == "belady":
        found = optimum(catalogue, steps, slots)
    else:
        policy = job.arm.made(catalogue, files)
        found = replay(policy, steps, slots, paths=job.arm.paths(files)(policy, trace))
    return {"arm": job.arm.name, "at_once": job.at_once, "share": job.share, "slots": slots, "hit_rate": found.hit_rate}
