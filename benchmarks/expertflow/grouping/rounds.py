"""Timed replays whose steps a batch policy forms, as jobs of processes side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.expertflow.arms import KNOWN, OURS
from benchmarks.expertflow.replay_jobs import EXPERT_BYTES, RECALL, Machine
from benchmarks.expertflow.routings import opened
from greenroom.core.units import MIB
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.expertflow.token_scheduler import TokenScheduler
from greenroom.replay.simulation.timed_replay import TimedEngine, TimedReplay
from greenroom.replay.traces.scheduled_steps import ScheduledStep, Scheduling, scheduled_steps

MACHINE: Final = Machine(6, 0.5)
SHARE: Final = 1 / 3

Batching = Literal["fcfs", "token-scheduler", "literal", "forced"]
"""``fcfs``: one forward, or fixed groups where it may not hold all. ``forced``: two groups in any case."""


@dataclass(frozen=True, slots=True)
class RoundsJob:
    """``running``: sequences at once, of which a forward holds up to ``rows_per_forward`` decode rows (None: all).
    ``known``: paths are those of the trace. ``told`` False: the policy does not hear of a forward before it begins, so
    wants do not cross the border of steps. ``rounds``: rows for each running sequence. ``seed``: of the routers'
    mistakes, and of the groups that a literal one starts from."""

    folder: Path
    batching: Batching
    running: int
    rounds: int
    rows_per_forward: int | None = None
    known: bool = False
    told: bool = True
    seed: int = 0

    def policy(self) -> BatchPolicy:
        if self.batching == "fcfs":
            return FcfsBatching()
        return TokenScheduler(literal=self.batching == "literal", force=self.batching == "forced", seed=self.seed)


def replayed(job: RoundsJob) -> dict[str, Any]:
    """What is found, of rows and of rounds. ``forwards``: in a round, the mean."""
    trace, files = opened(job.folder)
    arm = KNOWN if job.known else OURS
    setup = TimedReplay(trace, EXPERT_BYTES, MACHINE.link(), MACHINE.compute(int(trace.experts.shape[2])))
    policy = arm.made(setup.catalogue(), files)
    foretold = arm.paths(files)(policy, trace)
    assert foretold is not None
    setup = replace(setup, recall=RECALL, graded=True, seed=job.seed)
    slots = round(SHARE * policy.catalogue.size)
    counted = _Counted()
    with TimedEngine(setup, policy, slots) as engine:
        scheduling = Scheduling(
            job.running, job.rows_per_forward, paths=None if job.known else foretold, known=job.known,
            resident=lambda: engine.experts.device.resident,
        )  # fmt: skip
        steps = counted.of(scheduled_steps(trace, job.policy(), scheduling), job.rounds)
        found = engine.run(steps if job.told else (replace(step, following=None) for step in steps))
    return {
        "batching": job.batching,
        "running": job.running,
        "rows_per_forward": job.rows_per_forward,
        "known": job.known,
        "told": job.told,
        "seed": job.seed,
        "slots": slots,
        "rows": found.tokens,
        "rounds": counted.rounds,
        "forwards": counted.forwards / counted.rounds,
        "ready_rate": found.hit_rate,
        "ms": 1e3 * found.seconds / found.tokens,
        "round_ms": 1e3 * found.seconds / counted.rounds,
        "stall_ms": 1e3 * found.stall_seconds / found.tokens,
        "mib": found.bytes_moved / found.tokens / MIB,
    }


class _Counted:
    """Counts rounds and their forwards. A round is what is planned together."""

    def __init__(self) -> None:
        self.forwards = self.rounds = 0

    def of(self, steps: Iterable[ScheduledStep], rounds: int) -> Iterator[ScheduledStep]:
        """The first so many rounds."""
        for step in steps:
            self.forwards += 1
            self.rounds += step.following is None
            yield step
            if self.rounds == rounds:
                return
