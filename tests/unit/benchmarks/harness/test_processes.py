"""Children: real processes, with a system that does as it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from benchmarks.harness.children.processes import ArmFailed, Children, ChildSpec

TURN = {"prompts": [[1, 2]], "lengths": [3]}


def scripted(**settings: str) -> ChildSpec:
    return ChildSpec.of("tests.unit.benchmarks.scripted_arms:Scripted", settings)


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


@pytest.fixture
def children() -> Iterator[Children]:
    with Children(open_timeout_s=60) as opened:
        yield opened


def test_a_child_does_what_it_is_told_and_ends(children: Children) -> None:
    child = children.get(scripted())
    pid = child.description["pid"]
    assert pid != os.getpid()
    assert child.tell("run", 60, **TURN)["tokens"] == 3
    assert children.get(scripted()) is child, "one process a specification"
    assert children.opened(scripted()) is child
    children.close_all_but()
    assert gone(pid)
    assert children.opened(scripted()) is None


def test_what_fails_within_it_is_told_and_it_lives_on(children: Children) -> None:
    child = children.get(scripted(fail="run"))
    with pytest.raises(ArmFailed, match="RuntimeError: the run failed"):
        child.tell("run", 60, **TURN)
    assert child.alive


def test_one_that_can_not_be_opened_says_why_every_time(children: Children) -> None:
    for _ in range(2):
        with pytest.raises(ArmFailed, match="can not be opened"):
            children.get(scripted(fail="open"))


def test_one_that_dies_leaves_its_last_words(children: Children) -> None:
    child = children.get(scripted(fail="die"))
    with pytest.raises(ArmFailed, match=r"ended with 3: (?s:.*)last words"):
        child.tell("run", 60, **TURN)
    with pytest.raises(ArmFailed):
        child.tell("run", 60, **TURN)


def test_one_that_hangs_is_ended(children: Children) -> None:
    child = children.get(scripted(fail="hang"))
    with pytest.raises(ArmFailed, match="no answer within 0 s"):
        child.tell("run", 0.3, **TURN)
    children.give_up(scripted(fail="hang"), "it hung")
    assert gone(child.description["pid"])
    with pytest.raises(ArmFailed, match="it hung"):
        children.get(scripted(fail="hang"))


def test_only_those_that_are_kept_stay(children: Children) -> None:
    kept, other = (
        children.get(scripted()),
        children.get(ChildSpec.of("tests.unit.benchmarks.scripted_arms:Scripted", {}, name="b")),
    )
    children.close_all_but({scripted()})
    assert kept.alive
    assert not other.alive
