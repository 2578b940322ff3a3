"""The engine that runs a collaboration, with real threads, memories and reads, and experts that are bytes."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.coe.serving import request_table
from greenroom.core.errors import DeadlinePassed, ExpertFailed, InvalidRequest, ModelBroken, Saturated, TransferFailed
from tests.examples import examples
from tests.unit.coe.serving.scripted_collaboration import (
    BAD,
    CRASH,
    DEADLY,
    GRAPH,
    SELECTIONS,
    Scripted,
    path_of,
)
from tests.waiting import until_others

every_selection = pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
requests = st.lists(st.tuples(st.integers(0, 63), st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=40)


def walked(outcome: object) -> list[tuple[str, str | None]]:
    return [(stage.expert, stage.result.label) for stage in outcome.stages]  # type: ignore[attr-defined]


@every_selection
@given(asked=requests, share=st.sampled_from([0.0, 0.4, 1.0, 2.0]), executors=st.integers(1, 3), most=st.integers(1, 5))
@settings(max_examples=examples(15), deadline=None)
def test_nothing_is_lost_or_twice(
    selection: object, asked: list[tuple[int, str, bool]], share: float, executors: int, most: int
) -> None:
    """Every request that is not cancelled is told its way once; of a cancelled one at most once, and nothing stays."""
    before = set(threading.enumerate())
    with Scripted(selection, share=share, executors=executors, most=most) as scripted:  # type: ignore[arg-type]
        scripted.store.open()
        for number, (byte, value, cancelled) in enumerate(asked):
            scripted.submit(str(number), bytes([byte]), value)
            if cancelled:
                scripted.engine.cancel(str(number))
        kept = [number for number, (_, _, cancelled) in enumerate(asked) if not cancelled]
        until_others(lambda: scripted.engine.counters.left == len(asked), lambda: scripted.engine.failure or "all end")
        for number in kept:
            byte, value, _ = asked[number]
            (outcome,) = scripted.told.outcomes[str(number)]
            assert outcome.error is None
            assert walked(outcome) == path_of(bytes([byte]), value)
        assert all(len(outcomes) == 1 for outcomes in scripted.told.outcomes.values())
        assert scripted.engine.executing() == frozenset()
    for memory in scripted.memories:
        memory.audit()
        assert not memory._waiting
    assert scripted.engine.waiting == 0
    assert set(threading.enumerate()) == before


@every_selection
def test_a_broken_record_fails_exactly_those_that_need_it(selection: object) -> None:
    with Scripted(selection, share=0.0) as scripted:  # type: ignore[arg-type]
        scripted.store.broken.add(GRAPH.names.index("x"))
        scripted.store.altered.add(GRAPH.names.index("d"))
        scripted.store.open()
        for byte in range(64):
            for value in "abcd":
                scripted.submit(f"{value}{byte}", bytes([byte]), value)
        scripted.told.wait(256)
        for byte in range(64):
            for value in "abcd":
                (outcome,) = scripted.told.outcomes[f"{value}{byte}"]
                whole = path_of(bytes([byte]), value)
                good = whole[: next((at for at, (name, _) in enumerate(whole) if name in "xd"), len(whole))]
                assert walked(outcome) == good
                assert (outcome.error is None) == (good == whole)
        assert scripted.engine.alive
        assert scripted.engine.counters.failed == sum(
            any(name in "xd" for name, _ in path_of(bytes([byte]), value)) for byte in range(64) for value in "abcd"
        )
        scripted.store.broken.clear()  # the disk has recovered
        scripted.submit("again", bytes([0]), "a")
        scripted.told.wait(1)
        assert scripted.told.outcomes["again"][0].error is None
    for memory in scripted.memories:
        memory.audit()


def test_a_failed_read_is_told_as_one() -> None:
    with Scripted(SELECTIONS["pull"]) as scripted:
        scripted.store.broken.add(3)
        scripted.store.open()
        scripted.submit("one", b"\0", "d")
        scripted.told.wait(1)
        assert isinstance(scripted.told.outcomes["one"][0].error, TransferFailed)


@every_selection
def test_bad_inputs_fail_alone(selection: object) -> None:
    """Of one batch: an input that is refused, one through which the whole batch crashes, and good ones."""
    with Scripted(selection, executors=1, most=8, held=True) as scripted:  # type: ignore[arg-type]
        scripted.store.open()
        scripted.submit("first", b"\0", "d")
        scripted.computers[0].begun.get(timeout=20)
        for name, given in (("good", b"\0"), ("bad", BAD), ("crash", CRASH), ("fine", b"\1")):
            scripted.submit(name, given, "d")
        scripted.computers[0].permits.release(100)
        scripted.told.wait(5)
        errors = {name: outcomes[0].error for name, outcomes in scripted.told.outcomes.items()}
        assert {name for name, error in errors.items() if error is None} == {"first", "good", "fine"}
        assert isinstance(errors["bad"], InvalidRequest)
        assert isinstance(errors["crash"], ExpertFailed)


class Compared(str):
    """Counts how often ids are compared one by one, as looking through a queue does. A dictionary does not."""

    times = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other


@every_selection
@pytest.mark.parametrize("wait", [False, True], ids=["before they are known", "while they wait"])
def test_a_cancel_costs_the_same_however_many_wait(
    selection: object, wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = 600
    numbers = map(Compared, itertools.count())
    monkeypatch.setattr(request_table, "str", lambda number: next(numbers), raising=False)
    monkeypatch.setattr(Compared, "times", 0)
    held = threading.Event()
    with Scripted(selection, executors=1, held=True) as scripted:  # type: ignore[arg-type]
        scripted.store.open()
        scripted.submit("runs", b"\0", "d")
        scripted.computers[0].begun.get(timeout=20)
        if not wait:  # the deciding thread is kept from looking
            late = scripted.engine.now() - 1.0
            scripted.engine.submit("held", b"\0", "d", on_end=lambda _: held.wait(20), deadline_s=late)
            until_others(lambda: scripted.engine.counters.requests == 2, "it is held")
        for number in range(many):
            scripted.submit(str(number), b"\0", "abcd"[number // 2 % 4])
        if wait:
            until_others(lambda: scripted.engine.waiting == many, "all wait")
        for number in reversed(range(many)):
            scripted.engine.cancel(str(number))
        held.set()
        until_others(lambda: scripted.engine.counters.left >= many, "all are gone")
        until_others(lambda: not scripted.engine.waiting, "none waits")
    assert Compared.times < 10 * many


def test_cancelled_while_it_runs_and_submitted_again() -> None:
    with Scripted(SELECTIONS["pull"], executors=1, held=True) as scripted:
        scripted.store.open()
        scripted.submit("one", b"\1", "a")
        assert scripted.computers[0].begun.get(timeout=20) == (0, 1)
        assert scripted.engine.executing() == {"one"}
        scripted.engine.cancel("one")
        scripted.submit("one", b"\0", "d")
        with pytest.raises(InvalidRequest, match="here already"):
            scripted.submit("one", b"\0", "d")
        scripted.computers[0].permits.release(100)
        scripted.told.wait(1)
        until_others(lambda: scripted.engine.counters.left == 2, "both are gone")
        (outcome,) = scripted.told.outcomes["one"]
        assert outcome.path == ("d",)


@every_selection
def test_a_deadline_ends_what_waits_and_what_runs(selection: object) -> None:
    with Scripted(selection, executors=1, held=True, most=1) as scripted:  # type: ignore[arg-type]
        scripted.store.open()
        now = scripted.engine.now()
        scripted.submit("runs", b"\0", "d", now + 0.2)
        scripted.computers[0].begun.get(timeout=20)
        scripted.submit("waits", b"\0", "a", now + 0.2)
        scripted.submit("is late already", b"\0", "b", now - 1.0)
        scripted.submit("has time", b"\0", "d")
        scripted.told.wait(3)
        for name in ("runs", "waits", "is late already"):
            assert isinstance(scripted.told.outcomes[name][0].error, DeadlinePassed)
        scripted.computers[0].permits.release(100)
        scripted.told.wait(1)
        assert scripted.told.outcomes["has time"][0].error is None
        until_others(lambda: scripted.engine.counters.left == 4, "all are gone")


@every_selection
def test_a_caller_that_fails_ends_nobody_else(selection: object, caplog: pytest.LogCaptureFixture) -> None:
    def fails(outcome: object) -> None:
        raise RuntimeError("the caller is gone")

    with Scripted(selection, executors=1) as scripted:  # type: ignore[arg-type]
        scripted.store.open()
        scripted.engine.submit("bad", b"\0", "d", on_end=fails)
        scripted.engine.submit("late", b"\0", "d", on_end=fails, deadline_s=scripted.engine.now() - 1.0)
        scripted.submit("good", b"\0", "d")
        scripted.told.wait(1)
        until_others(lambda: scripted.engine.counters.left == 3, lambda: scripted.engine.failure or "all end")
        assert scripted.engine.alive
        assert scripted.engine.counters.ended == 3
    assert "outcome of bad has failed" in caplog.text
    assert "RuntimeError: the caller is gone" in caplog.text


def test_a_dead_executor_ends_the_engine() -> None:
    changed = threading.Event()
    with Scripted(SELECTIONS["coserve"]) as scripted:
        scripted.engine.on_changed = changed.set
        scripted.store.open()
        scripted.submit("one", DEADLY, "d")
        until_others(lambda: not scripted.engine.alive, "it ends")
        assert isinstance(scripted.engine.failure, ModelBroken)
        assert changed.is_set()
        with pytest.raises(ModelBroken):
            scripted.submit("two", b"\0", "d")
        assert not scripted.told.outcomes, "another worker is to serve it"


def test_a_dead_mover_ends_the_engine() -> None:
    with Scripted(SELECTIONS["pull"]) as scripted:
        scripted.store.open()
        scripted.link._outbox.fail(RuntimeError("dead"))
        until_others(lambda: not scripted.engine.alive, "it ends")
        assert isinstance(scripted.engine.failure, ModelBroken)


def test_a_read_that_never_ends_ends_the_engine() -> None:
    """Or who needs its expert would wait for ever."""
    with Scripted(SELECTIONS["pull"], read_timeout_s=0.05) as scripted:
        scripted.submit("one", b"\0", "d")
        until_others(lambda: not scripted.engine.alive, "it ends")
        assert "the disk gives nothing" in str(scripted.engine.failure)
        assert not scripted.told.outcomes, "another worker is to serve it"


def test_what_is_executed_is_told_before_it_is_given_away() -> None:
    seen: list[frozenset[str]] = []
    with Scripted(SELECTIONS["pull"], executors=1) as scripted:
        scripted.engine.on_changed = lambda: seen.append(scripted.engine.executing())
        scripted.store.open()
        scripted.submit("one", DEADLY, "d")
        until_others(lambda: not scripted.engine.alive, "it ends")
    assert seen[0] == {"one"}


def test_too_many_are_refused() -> None:
    with Scripted(SELECTIONS["pull"]) as scripted:
        scripted.engine._requests.most = 2
        scripted.submit("one", b"\0", "d")
        scripted.submit("two", b"\0", "d")
        with pytest.raises(Saturated):
            scripted.submit("three", b"\0", "d")
        with pytest.raises(InvalidRequest, match="known: a, b, c, d"):
            scripted.submit("four", b"\0", "nobody")


def test_an_idle_engine_audits_itself() -> None:
    with Scripted(SELECTIONS["pull"]) as scripted:
        scripted.memories[0]._coming.add(5)
        scripted.wake.set()
        until_others(lambda: scripted.engine.counters.failed_audits == 1, "it is found")
        scripted.memories[0]._coming.clear()
