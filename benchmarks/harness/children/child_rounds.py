"""Stages whose arms are child processes: all are open at once and take turns, round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.children.processes import ArmFailed, Child, Children, ChildSpec
from benchmarks.harness.disk import drop_cache
from benchmarks.harness.inputs.token_streams import Stream
from benchmarks.harness.rounds import in_turns
from benchmarks.harness.rows import Row
from benchmarks.harness.turn import Turn

OPEN_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Arm:
    """One row to be measured.

    ``arguments``: of the child's ``run``, beside the stream. ``warm_up``: the stream before the measured rounds, with
    ``warm_arguments`` added. ``cold``: files and folders to drop from the page cache before every turn.
    """

    row: Row
    child: ChildSpec
    stream: Stream
    warm_up: Stream
    arguments: Mapping[str, Any] = field(default_factory=dict)
    warm_arguments: Mapping[str, Any] = field(default_factory=dict)
    cold: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Stage:
    """At most ``rounds`` rounds after one that warms up. None begins after ``seconds``, but the first always runs."""

    arms: tuple[Arm, ...]
    rounds: int
    seconds: float

    @property
    def turns(self) -> int:
        return len(self.arms) * (self.rounds + 1)


def run_stage(
    stage: Stage,
    children: Children,
    *,
    tell: Callable[[int, str], object] = lambda turns, what: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The stage's rows. An arm that fails ends no other. The children stay open.

    ``tell``: called with the number of turns done, or left out, and with the arm's name.
    """
    left = stage.turns
    for round_, arm in in_turns(stage.arms, stage.rounds, stage.seconds, clock=clock):
        if arm.row.error is None:
            _take_turn(arm, children, round_)
        tell(1, f"{arm.row.model}: {arm.row.name}")
        left -= 1
    if left:
        tell(left, "out of time")
    for arm in stage.arms:
        _note_peak(arm.row, children, arm.child)
    return [arm.row for arm in stage.arms]


def _take_turn(arm: Arm, children: Children, round_: int) -> None:
    row = arm.row
    try:
        child = children.get(arm.child)
        row.facts = child.description
        drop_cache(path for path in arm.cold if path.exists())
        stream = arm.stream if round_ else arm.warm_up
        extra = arm.arguments if round_ else {**arm.arguments, **arm.warm_arguments}
        turn = Turn.of_json(child.tell("run", TURN_TIMEOUT_S, **stream.as_arguments(), **extra))
    except ArmFailed as error:
        row.error = str(error)
        _note_peak(row, children, arm.child)
        children.give_up(arm.child, str(error))
        return
    if round_:
        row.turns[round_] = turn
    else:
        row.trace = turn.trace


def _note_peak(row: Row, children: Children, spec: ChildSpec) -> None:
    child: Child | None = children.opened(spec)
    if child is not None and child.cgroup is not None:
        row.cgroup_peak_bytes = child.cgroup.peak_bytes
        row.limit_bytes = child.cgroup.limit_bytes
