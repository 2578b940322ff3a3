"""The small languages of the command line: lengths, mixes of tasks, targets."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom_load.lengths import Lengths
from greenroom_load.mix import ShiftingMix, TaskMix
from greenroom_load.targets import Targets, TargetsByTask


def drawn(text: str, count: int = 5_000) -> list[int]:
    lengths, rng = Lengths.parse(text, field="output_len"), Random(1)
    return [lengths.draw(rng, None) for _ in range(count)]


def test_lengths_follow_their_distribution() -> None:
    assert set(drawn("fixed:64")) == set(drawn("64")) == {64}
    assert set(drawn("uniform:3,5")) == {3, 4, 5}
    assert np.mean(drawn("normal:100,10")) == pytest.approx(100, rel=0.02)
    assert np.std(drawn("normal:100,10")) == pytest.approx(10, rel=0.1)
    assert np.median(drawn("lognormal:200,0.8")) == pytest.approx(200, rel=0.05)
    assert np.mean(drawn("exponential:50")) == pytest.approx(50, rel=0.05)


@given(
    st.sampled_from(["fixed:700", "normal:5,50", "lognormal:9,3", "exponential:90", "uniform:1,900"]),
    st.integers(1, 80),
    st.integers(),
)
def test_lengths_stay_in_their_bounds(text: str, most: int, seed: int) -> None:
    lengths = Lengths.parse(text, field="output_len", most=most)

    assert 1 <= lengths.draw(Random(seed), None) <= most


def test_recorded_lengths_are_scaled_and_needed() -> None:
    lengths = Lengths.parse("trace", field="input_len", scale=0.1, most=30)

    assert [lengths.draw(Random(0), recorded) for recorded in (100, 1000, 0)] == [10, 30, 1]
    with pytest.raises(InvalidConfig, match="column of lengths"):
        lengths.draw(Random(0), None)


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:x", "uniform:5,3", "normal:1", "zipf:3", "fixed:1,2"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"output_len.*lognormal:MEDIAN,SIGMA"):
        Lengths.parse(text, field="output_len")


def test_a_mix_is_drawn_by_its_weights() -> None:
    mix, rng = ShiftingMix(TaskMix.parse("summarise=2, question=6,compare=0", field="task_mix")), Random(5)
    counts = Counter(mix.draw(rng, 0.5) for _ in range(10_000))

    assert set(counts) == {"summarise", "question"}
    assert counts["question"] / 10_000 == pytest.approx(0.75, abs=0.02)


def test_a_mix_moves_evenly_from_one_to_the_other() -> None:
    mix = ShiftingMix(TaskMix({"summarise": 1}), TaskMix({"summarise": 1, "question": 3}))

    assert mix.shares(0.0) == {"summarise": 1.0, "question": 0.0}
    assert mix.shares(0.5) == pytest.approx({"summarise": 0.625, "question": 0.375})
    assert mix.shares(1.0) == mix.shares(7.0) == pytest.approx({"summarise": 0.25, "question": 0.75})
    assert {mix.draw(Random(seed), 0.0) for seed in range(99)} == {"summarise"}


@pytest.mark.parametrize("text", ["", "a", "a=x", "a=1,a=2", "a=-1", "a=0", "=1", "a=inf", "a=nan"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"task_mix.*summarise=0\.4"):
        TaskMix.parse(text, field="task_mix")


def test_a_task_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(UnknownName, match="known: compare, question"):
        TaskMix({"sing": 1}).check(["question", "compare"], field="task_mix")


def test_targets_are_read_and_judged() -> None:
    targets = Targets.parse("ttft:200 tpot:50,e2el:2000", field="goodput")

    assert targets == Targets(ttft_ms=200, tpot_ms=50, e2e_ms=2000)
    assert targets.met(0.2, 0.05, 2.0)
    assert not targets.met(0.2001, 0.05, 2.0)
    assert not targets.met(0.2, 0.0501, 2.0)
    assert not targets.met(0.2, 0.05, 2.001)
    assert not targets.met(None, 0.05, 2.0)
    assert Targets(tpot_ms=1).met(None, 0.001, 99)


@pytest.mark.parametrize("text", ["", "ttft", "ttft:0", "ttft:x", "itl:5", "ttft:1,ttft:2", "e2e:1,e2el:2", "tpot:inf"])
def test_targets_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match=r"goodput.*ttft:200"):
        Targets.parse(text, field="goodput")


def test_targets_by_task() -> None:
    slos = TargetsByTask.parse(["question=ttft:200", "ttft:900"])

    assert slos.of("question") == Targets(ttft_ms=200)
    assert slos.of("compare") == slos.of(None) == Targets(ttft_ms=900)
    assert TargetsByTask.parse(["question=ttft:200"]).of("compare") is None
    assert slos.as_json() == {"question": {"ttft_ms": 200.0}, "*": {"ttft_ms": 900.0}}


@pytest.mark.parametrize("texts", [["a=ttft:1", "a=ttft:2"], ["ttft:1", "ttft:2"], ["=ttft:1"], ["a=soon"]])
def test_contradicting_targets_are_refused(texts: list[str]) -> None:
    with pytest.raises(InvalidConfig, match="slo"):
        TargetsByTask.parse(texts)
