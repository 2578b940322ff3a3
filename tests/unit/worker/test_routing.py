"""Each sequence's own routing, taken out of the steps that many share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.policies.base.events import Phase, SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.replay import TraceRecorder
from greenroom.worker.traces.routing import RoutingRecorder
from tests.examples import examples

UNEVEN = Catalogue("pool", experts_per_layer=[4, 8, 3], top_k=[2, 3, 1], expert_bytes=[10, 10, 10])
WIDE = Catalogue.uniform("pool", layers=2, experts=300, top_k=4)


def step_of(catalogue: Catalogue, number: int, rows: list[int], *, tokens: bool = False) -> Step:
    phases = np.full(len(rows), Phase.PREFILL, dtype=np.uint8)
    told = np.arange(len(rows)) + 100 * number if tokens else None
    return Step(catalogue.pool, number, np.array(rows, dtype=np.int64), phases, told)


def picks_of(catalogue: Catalogue, layer: int, rows: int, seed: int) -> NDArray[np.int64]:
    """Distinct picks, some of them none."""
    random = np.random.default_rng(seed)
    experts, k = int(catalogue.experts_per_layer[layer]), int(catalogue.top_k[layer])
    return np.stack([random.permutation(experts + 2)[:k] for _ in range(rows)]).reshape(rows, k)


@settings(max_examples=examples(60), deadline=None)
@given(
    wide=st.booleans(),
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=9), st.booleans(), st.none() | st.integers(0, 3)),
        min_size=1,
        max_size=8,
    ),
    most_rows=st.integers(1, 40),
)
def test_it_is_what_the_trace_recorder_has_of_each_sequence(
    wide: bool, steps: list[tuple[list[int], bool, int | None]], most_rows: int
) -> None:
    """``steps``: the sequences of a step's rows, whether it fails, and which sequence is preempted before it."""
    catalogue = WIDE if wide else UNEVEN
    ours, theirs = RoutingRecorder(catalogue, most_rows=most_rows, tokens=True), TraceRecorder(catalogue)
    for sequence in range(4):
        for recorder in (ours, theirs):
            recorder.sequence_queued(SequenceInfo(sequence, "classify", prompt_tokens=2 * sequence))
    for number, (rows, failed, preempted) in enumerate(steps):
        if preempted is not None:
            ours.sequence_preempted(preempted)
            theirs.sequence_preempted(preempted)
        if not rows:
            continue
        step = step_of(catalogue, number, rows, tokens=True)
        for layer in range(catalogue.layers):
            picks = picks_of(catalogue, layer, len(rows), 10 * number + layer)
            ours.layer_routed(step, layer, picks)
            theirs.layer_routed(step, layer, picks)
        ours.step_ended(step, failed=failed)
        theirs.step_ended(step, failed=failed)
    trace = theirs.trace()
    for sequence in range(4):
        start, stop = trace.seq_starts[sequence : sequence + 2]
        of_prompt = min(2 * sequence, stop - start)
        kept = min(of_prompt, max(1, int(0.75 * most_rows)))
        recorded = np.concatenate((np.arange(kept), np.arange(of_prompt, stop - start)))[:most_rows]
        expected = trace.experts[start:stop][recorded]
        routed = ours.take(sequence)
        if not len(expected):
            assert routed is None
            continue
        assert routed is not None
        assert routed.experts.dtype == (np.uint16 if wide else np.uint8)
        assert np.array_equal(routed.experts, expected)
        assert trace.token is not None
        assert routed.tokens is not None
        assert routed.tokens.dtype == np.uint32
        assert np.array_equal(routed.tokens, trace.token[start:stop][recorded])
        assert routed.prompt_rows == kept
        assert routed.num_experts == int(catalogue.experts_per_layer.max())
    assert ours.held == 0


def test_a_number_that_would_wrap_around_is_no_pick() -> None:
    recorder = RoutingRecorder(UNEVEN, most_rows=4)
    recorder.sequence_queued(SequenceInfo(0))
    step = step_of(UNEVEN, 0, [0])
    for layer in range(3):
        recorder.layer_routed(step, layer, np.full((1, int(UNEVEN.top_k[layer])), 256 + 1))
    recorder.step_ended(step, failed=False)
    routed = recorder.take(0)
    assert routed is not None
    assert (routed.experts == 255).all()


def test_a_long_prompt_leaves_room_for_its_answer() -> None:
    recorder = RoutingRecorder(UNEVEN, most_rows=8)
    recorder.sequence_queued(SequenceInfo(0, prompt_tokens=20))
    own = {layer: picks_of(UNEVEN, layer, 25, layer) for layer in range(3)}
    for number, rows in enumerate((slice(0, 12), slice(12, 20), slice(20, 21), slice(21, 25))):
        step = step_of(UNEVEN, number, [0] * (rows.stop - rows.start))
        for layer in range(3):
            recorder.layer_routed(step, layer, own[layer][rows])
        recorder.step_ended(step, failed=False)
    routed = recorder.take(0)
    assert routed is not None
    assert (len(routed.experts), routed.prompt_rows) == (8, 6)
    expected = np.minimum(own[1][[0, 1, 2, 3, 4, 5, 20, 21]], 255)
    expected[expected >= 8] = 255
    assert np.array_equal(routed.experts[:, 1, :3], expected)


def test_sequences_that_were_not_announced_are_left_alone() -> None:
    recorder = RoutingRecorder(UNEVEN, most_rows=4)
    step = step_of(UNEVEN, 0, [7])
    for layer in range(3):
        recorder.layer_routed(step, layer, picks_of(UNEVEN, layer, 1, 0))
    recorder.step_ended(step, failed=False)
    assert recorder.take(7) is None
    assert recorder.held == 0


def test_what_the_policy_says_of_a_sequence_goes_with_its_rows() -> None:
    recorder = RoutingRecorder(UNEVEN, most_rows=4)
    for sequence in (0, 1):
        recorder.sequence_queued(SequenceInfo(sequence))
    step = step_of(UNEVEN, 0, [0, 1])
    for layer in range(3):
        recorder.layer_routed(step, layer, picks_of(UNEVEN, layer, 2, 0))
    recorder.step_ended(step, failed=False)
    recorder.sequence_reported(0, {"recall": 0.5})
    recorder.sequence_reported(7, {"recall": 0.5})  # it was not announced
    told, silent = recorder.take(0), recorder.take(1)
    assert told is not None
    assert silent is not None
    assert (told.report, silent.report) == ({"recall": 0.5}, {})


@pytest.mark.parametrize("rows", [63, 64, 65, 500])
def test_a_step_may_be_of_any_size(rows: int) -> None:
    recorder = RoutingRecorder(UNEVEN, most_rows=1000)
    recorder.sequence_queued(SequenceInfo(0, prompt_tokens=rows))
    step = step_of(UNEVEN, 0, [0] * rows)
    picks = [picks_of(UNEVEN, layer, rows, layer) for layer in range(3)]
    for layer in range(3):
        recorder.layer_routed(step, layer, picks[layer])
    recorder.step_ended(step, failed=False)
    routed = recorder.take(0)
    assert routed is not None
    assert routed.experts.shape == (rows, 3, 3)
    assert np.array_equal(routed.experts[:, 0, :2], np.where(picks[0] < 4, picks[0], 255))


@pytest.mark.parametrize(
    ("asked", "told", "kept"),
    [
        (False, (True, True), None),
        (True, (True, False), None),
        (True, (False, True), None),
        (True, (True, True), [0, 100]),
    ],
)
def test_tokens_are_kept_where_they_are_asked_for_and_every_step_told_them(
    asked: bool, told: tuple[bool, bool], kept: list[int] | None
) -> None:
    recorder = RoutingRecorder(UNEVEN, most_rows=4, tokens=asked)
    recorder.sequence_queued(SequenceInfo(0))
    for number, tokens in enumerate(told):
        step = step_of(UNEVEN, number, [0], tokens=tokens)
        for layer in range(3):
            recorder.layer_routed(step, layer, picks_of(UNEVEN, layer, 1, number))
        recorder.step_ended(step, failed=False)
    routed = recorder.take(0)
    assert routed is not None
    assert len(routed.experts) == 2
    assert (None if routed.tokens is None else routed.tokens.tolist()) == kept
