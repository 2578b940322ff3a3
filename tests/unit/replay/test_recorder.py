"""What is recorded is what ran."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.policies.base.events import Phase, SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.replay import RoutingTrace, TraceRecorder
from tests.examples import examples
from tests.hand_clock import HandClock

CATALOGUE = Catalogue("pool", experts_per_layer=[3, 5], top_k=[1, 2], expert_bytes=[4096, 4096])


def picks_of(random: np.random.Generator, rows: int) -> list[NDArray[np.int64]]:
    """A layer's picks each, of distinct experts."""
    return [
        np.argsort(random.random((rows, experts)), axis=1)[:, :k]
        for experts, k in zip(CATALOGUE.experts_per_layer, CATALOGUE.top_k, strict=True)
    ]


def run(recorder: TraceRecorder, number: int, sequences: list[int], phases: list[Phase], seed: int) -> Any:
    step = Step("pool", number, np.array(sequences), np.array(phases, dtype=np.uint8))
    picks = picks_of(np.random.default_rng(seed), len(sequences))
    for layer, own in enumerate(picks):
        recorder.layer_routed(step, layer, own)
    recorder.step_ended(step, failed=False)
    return sequences, phases, picks


def test_sequences_keep_task_and_arrival_in_the_order_in_which_they_came() -> None:
    clock = HandClock(10.0)
    recorder = TraceRecorder(CATALOGUE, clock=clock)
    for sequence, task in ((4, "compare"), (7, "unknown"), (9, "question")):
        recorder.sequence_queued(SequenceInfo(sequence, task))
        clock.now += 0.5
    run(recorder, 3, [9, 4], [Phase.PREFILL, Phase.DECODE], 0)

    trace = recorder.trace(model="small", layer_ids=[1, 3])

    assert trace.seq_starts.tolist() == [0, 1, 1, 2], "7 never ran"
    assert trace.task == ("compare", "unknown", "question")
    assert trace.arrival is not None
    assert trace.arrival.tolist() == [0.0, 0.5, 1.0]
    assert trace.phase is not None
    assert trace.phase.tolist() == [Phase.DECODE, Phase.PREFILL]
    assert trace.experts_per_layer.tolist() == [3, 5]
    assert trace.layer_ids is not None
    assert (trace.model, trace.layer_ids.tolist(), trace.catalogue().top_k.tolist()) == ("small", [1, 3], [1, 2])


def test_a_step_that_fails_counts_only_as_it_is_run_again() -> None:
    recorder = TraceRecorder(CATALOGUE)
    step = Step("pool", 1, np.array([0, 1]), np.array([Phase.DECODE] * 2, dtype=np.uint8))
    for layer, own in enumerate(picks_of(np.random.default_rng(9), 2)):
        recorder.layer_routed(step, layer, own)
    recorder.step_ended(step, failed=True)
    half = Step("pool", 2, np.array([0]), np.array([Phase.DECODE], dtype=np.uint8))
    recorder.layer_routed(half, 0, np.array([[0]]))
    recorder.step_ended(half, failed=True)

    _, _, picks = run(recorder, 3, [1], [Phase.DECODE], 1)

    trace = recorder.trace()
    assert trace.tokens == recorder.tokens == 1
    assert trace.experts[0, 1].tolist() == picks[1][0].tolist()


def test_what_the_caller_changes_later_is_not_recorded() -> None:
    recorder = TraceRecorder(CATALOGUE)
    sequences, phases = np.array([0]), np.array([Phase.DECODE], dtype=np.uint8)
    step = Step("pool", 1, sequences, phases)
    picks = [np.array([[2]]), np.array([[4, 1]])]
    for layer, own in enumerate(picks):
        recorder.layer_routed(step, layer, own)
        own[:] = 0
    recorder.step_ended(step, failed=False)
    sequences[0], phases[0] = 5, Phase.PREFILL

    trace = recorder.trace()

    assert trace.experts.tolist() == [[[2, 255], [4, 1]]]
    assert trace.sequences == 1
    assert trace.phase is not None
    assert trace.phase.tolist() == [Phase.DECODE]


def test_nothing_recorded_is_an_empty_trace() -> None:
    recorder = TraceRecorder(CATALOGUE)
    run(recorder, 1, [0], [Phase.DECODE], 0)
    recorder.clear()

    trace = recorder.trace()

    assert (trace.tokens, trace.sequences) == (0, 0)
    assert list(trace.recorded_steps()) == list(trace.steps()) == []


sequences = st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True)


@given(schedule=st.lists(st.tuples(sequences, st.integers(1, 3)), min_size=1, max_size=8))
@settings(max_examples=examples(60), deadline=None)
def test_recorded_steps_are_the_steps_that_ran(schedule: list[tuple[list[int], int]]) -> None:
    recorder = TraceRecorder(CATALOGUE)
    begun: set[int] = set()
    ran = []
    for number, (running, chunk) in enumerate(schedule):
        rows, phases = [], []
        for sequence in running:
            prefill = sequence not in begun
            rows += [sequence] * (chunk if prefill else 1)
            phases += [Phase.PREFILL if prefill else Phase.DECODE] * (chunk if prefill else 1)
            begun.add(sequence)
        ran.append(run(recorder, 10 * number, rows, phases, number))

    trace: RoutingTrace = recorder.trace()
    replayed = list(trace.recorded_steps())

    assert len(replayed) == len(ran)
    numbers = sorted(begun)
    for step, (rows, phases, picks) in zip(replayed, ran, strict=True):
        order = np.argsort(rows, kind="stable")
        assert [numbers[row] for row in step.sequences] == [rows[place] for place in order]
        assert step.phases.tolist() == [phases[place] for place in order]
        assert step.picks[:, 0, :1].tolist() == picks[0][order].tolist()
        assert step.picks[:, 1].tolist() == picks[1][order].tolist()


def test_rows_that_run_again_after_a_preemption_count_once() -> None:
    recorder = TraceRecorder(CATALOGUE)
    first = run(recorder, 1, [0, 0, 1, 1], [Phase.PREFILL] * 4, 1)
    second = run(recorder, 2, [0, 1], [Phase.DECODE] * 2, 2)
    recorder.sequence_preempted(1)
    run(recorder, 3, [0, 1, 1], [Phase.DECODE, Phase.PREFILL, Phase.PREFILL], 3)
    recorder.sequence_preempted(1)
    run(recorder, 4, [1, 1], [Phase.PREFILL] * 2, 4)
    fifth = run(recorder, 5, [1, 1], [Phase.PREFILL] * 2, 5)

    trace = recorder.trace()

    assert trace.seq_starts.tolist() == [0, 4, 8]
    assert trace.step is not None
    assert trace.step.tolist() == [0, 0, 1, 2, 0, 0, 1, 3], "the step of old rows alone is none"
    own = trace.experts[4:]
    for layer in range(2):
        k = int(CATALOGUE.top_k[layer])
        assert own[:2, layer, :k].tolist() == first[2][layer][2:].tolist()
        assert own[2, layer, :k].tolist() == second[2][layer][1].tolist()
        assert own[3, layer, :k].tolist() == fifth[2][layer][1].tolist()
