from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness.children.child_rounds import Arm, Stage, run_stage
from benchmarks.harness.children.processes import ArmFailed, ChildSpec
from benchmarks.harness.inputs.token_streams import Stream
from benchmarks.harness.rows import Row

LONG, SHORT = Stream(((1, 2), (3,)), (4, 5)), Stream(((1, 2),), (4,))


class FakeChild:
    """Answers turns of one second; ``fails_at`` names the turn (from 0) at which it fails instead."""

    def __init__(self, log: list[tuple[str, dict[str, Any]]], name: str, fails_at: int | None) -> None:
        self.description = {"slots": 3}
        self.cgroup = None
        self._log, self._name, self._fails_at, self._turns = log, name, fails_at, 0

    def tell(self, action: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self._log.append((self._name, arguments))
        self._turns += 1
        if self._turns - 1 == self._fails_at:
            raise ArmFailed("broken")
        trace = {"accesses": 1, "belady_bytes": 2, "bytes_touched": 3} if arguments.get("record") else None
        return {"seconds": 1.0, "tokens": sum(arguments["lengths"]), "ids": [], "trace": trace}


class FakeChildren:
    """As Children; ``failing``: by name of the arm, the turn at which it fails."""

    def __init__(self, **failing: int) -> None:
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.given_up: list[str] = []
        self._failing = failing
        self._open: dict[str, FakeChild] = {}

    def get(self, spec: ChildSpec) -> FakeChild:
        return self._open.setdefault(spec.name, FakeChild(self.log, spec.name, self._failing.get(spec.name)))

    def opened(self, spec: ChildSpec) -> FakeChild | None:
        return self._open.get(spec.name)

    def give_up(self, spec: ChildSpec, why: str) -> None:
        self.given_up.append(spec.name)


def arm(name: str, **values: Any) -> Arm:
    child = ChildSpec.of("fake", {}, name=name)
    return Arm(Row("s", "m", name), child, LONG, SHORT, {"concurrency": 2}, {"record": True}, **values)


def run(stage: Stage, children: FakeChildren, **values: Any) -> list[Row]:
    return run_stage(stage, children, **values)  # type: ignore[arg-type]


def test_arms_take_turns_and_each_round_begins_with_another() -> None:
    children = FakeChildren()
    rows = run(Stage((arm("a"), arm("b")), rounds=2, seconds=1e9), children)
    assert [name for name, _ in children.log] == ["a", "b", "b", "a", "a", "b"]
    assert [sorted(row.turns) for row in rows] == [[1, 2], [1, 2]]
    assert rows[0].facts == {"slots": 3}


def test_the_first_round_warms_up_and_is_not_measured() -> None:
    children = FakeChildren()
    (row,) = run(Stage((arm("a"),), rounds=1, seconds=1e9), children)
    warm, measured = (arguments for _, arguments in children.log)
    assert warm == {"prompts": [[1, 2]], "lengths": [4], "concurrency": 2, "record": True}
    assert measured == {"prompts": [[1, 2], [3]], "lengths": [4, 5], "concurrency": 2}
    assert row.trace is not None
    assert row.trace.belady_bytes == 2
    assert row.turns[1].tokens == 9


@pytest.mark.parametrize("fails_at", [0, 2])
def test_an_arm_that_fails_is_given_up_and_the_others_go_on(fails_at: int) -> None:
    children = FakeChildren(a=fails_at)
    failed, fine = run(Stage((arm("a"), arm("b")), rounds=3, seconds=1e9), children)
    assert failed.error == "broken"
    assert children.given_up == ["a"]
    assert sum(name == "a" for name, _ in children.log) == fails_at + 1
    assert sorted(fine.turns) == [1, 2, 3]


def test_no_round_begins_that_would_end_too_late_but_one_is_measured() -> None:
    told = []
    moments = iter(range(0, 1000, 10))

    def tell(turns: int, what: str) -> None:
        told.append(turns)

    stage = Stage((arm("a"), arm("b")), rounds=5, seconds=0)
    rows = run(stage, FakeChildren(), tell=tell, clock=lambda: float(next(moments)))
    assert sorted(rows[0].turns) == [1]
    assert sum(told) == stage.turns, "the bar comes to its end all the same"
