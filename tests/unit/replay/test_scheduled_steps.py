"""A batch policy forms a replay's steps: every row once, in order, with the paths that it was grouped by."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import BatchDecision, BatchState
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.expertflow.token_scheduler import TokenScheduler
from greenroom.policies.registry import BATCH_POLICIES, create_policy
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.scheduled_steps import ScheduledStep, Scheduling, scheduled_steps, true_paths
from greenroom.replay.traces.trace_file import TraceError
from tests.examples import examples

LAYERS, EXPERTS, TOP_K = 2, 8, 2


def traced(lengths: list[tuple[int, int]], seed: int = 0, *, prompts: bool = True) -> RoutingTrace:
    """Sequences of so many prompt and decode rows; the token of row i is i."""
    random = np.random.default_rng(seed)
    rows = sum(prompt + decode for prompt, decode in lengths)
    experts = np.argsort(random.random((rows, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)
    phases = [[Phase.PREFILL] * prompt + [Phase.DECODE] * decode for prompt, decode in lengths]
    return RoutingTrace(
        experts,
        np.cumsum([0, *(prompt + decode for prompt, decode in lengths)]),
        EXPERTS,
        phase=np.array([phase for own in phases for phase in own], dtype=np.uint8) if prompts else None,
        token=np.arange(rows),
    )


class Own(TokenPaths):
    """Foretells by token, which says the row; counts what it is asked and told. ``ran``: rows by sequence and position,
    with their picks."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.open: set[int] = set()
        self.ran: dict[tuple[int, int], NDArray[np.integer]] = {}
        self.ended: list[int] = []

    def begin(self, sequence: int, prompt: Ids) -> None:
        self.open.add(sequence)

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        assert self.open >= set(sequences.tolist())
        self.asked += tokens.tolist()
        return np.tile(tokens[:, None] / 1000, (1, LAYERS * EXPERTS)).astype(np.float32)

    def picked(self, sequences: Ids, positions: Ids, picks: NDArray[np.integer]) -> None:
        assert self.open >= set(sequences.tolist())
        for row, of in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
            assert of not in self.ran
            self.ran[of] = picks[row]

    def end(self, sequence: int) -> None:
        self.open.remove(sequence)
        self.ended.append(sequence)


def steps_of(trace: RoutingTrace, name: str, scheduling: Scheduling) -> list[ScheduledStep]:
    return list(scheduled_steps(trace, BATCH_POLICIES[name](), scheduling))


@pytest.mark.parametrize("name", sorted(BATCH_POLICIES))
@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=9),
    concurrent=st.integers(1, 5),
    rows=st.none() | st.integers(1, 3),
    chunk=st.none() | st.integers(1, 3),
    prompts=st.booleans(),
)
def test_each_row_runs_once_in_order_with_its_own_path(
    name: str, lengths: list[tuple[int, int]], concurrent: int, rows: int | None, chunk: int | None, prompts: bool
) -> None:
    trace, source = traced(lengths, prompts=prompts), Own()
    scheduling = Scheduling(concurrent, rows, tokens_per_step=6, prefill_chunk=chunk, paths=source)

    steps = steps_of(trace, name, scheduling)

    tokens = [token for each in steps for token in np.asarray(each.step.tokens).tolist()]
    assert sorted(tokens) == sorted(source.asked) == list(range(trace.tokens))
    assert source.open == set()
    running: set[int] = set()
    place = dict.fromkeys(range(len(lengths)), 0)
    for each in steps:
        step = each.step
        running |= set(step.started)
        assert len(running) <= concurrent
        assert set(step.sequences.tolist()) <= running
        assert len(step.sequences) <= 6
        assert rows is None or np.count_nonzero(step.phases == Phase.DECODE) <= rows
        for sequence, position in zip(step.sequences.tolist(), np.asarray(step.positions).tolist(), strict=True):
            assert position == place[sequence]
            place[sequence] += 1
        running -= set(step.ended)
        assert np.allclose(np.asarray(each.paths)[:, 0], np.asarray(step.tokens) / 1000)
        assert np.array_equal(step.picks, trace.experts[step.tokens])
    assert running == set()


def test_forwards_of_one_round_follow_each_other() -> None:
    trace = traced([(0, 3)] * 4, prompts=False)
    steps = steps_of(trace, "fcfs", Scheduling(4, rows_per_forward=2))
    assert [each.step.sequences.tolist() for each in steps] == [[0, 1], [2, 3]] * 3
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert first.following is second or first.following is not None
        assert first.following is not None
        assert first.following.step is second.step
        assert second.following is None


def test_a_policy_has_true_paths_where_they_are_known_and_what_is_resident() -> None:
    trace, seen = traced([(0, 2)] * 3, prompts=False), []

    class Reads(FcfsBatching):
        reads_paths = True

        def decide(self, state: BatchState) -> BatchDecision:
            assert state.paths is not None
            assert state.resident is not None
            seen.append(state.paths.chances)
            return super().decide(state)

    resident = np.ones(LAYERS * EXPERTS, dtype=np.bool_)
    steps = list(scheduled_steps(trace, Reads(), Scheduling(3, known=True, resident=lambda: resident)))

    assert np.array_equal(seen[1], true_paths(trace, np.array([1, 3, 5])))
    assert seen[1].sum(axis=1).tolist() == [LAYERS * TOP_K] * 3
    assert np.array_equal(np.asarray(steps[1].paths), seen[1])


def test_picks_and_then_ends_are_told_once_a_step_has_run() -> None:
    trace, source = traced([(3, 2), (1, 1), (2, 3)]), Own()
    ran, ended = 0, 0
    for each in scheduled_steps(trace, TokenScheduler(), Scheduling(3, rows_per_forward=1, paths=source)):
        assert (len(source.ran), len(source.ended)) == (ran, ended)
        ran += len(each.step.sequences)
        ended += len(each.step.ended)
    assert (len(source.ran), len(source.ended)) == (trace.tokens, 3)
    for (sequence, position), picks in source.ran.items():
        assert np.array_equal(picks, trace.experts[trace.seq_starts[sequence] + position])


def test_a_timed_replay_of_scheduled_steps_has_them_told_once() -> None:
    trace, source = traced([(3, 2), (2, 3)]), Own()
    setup = TimedReplay(trace, 4096, LinkProfile(1e9), ComputeProfile(layer_s=1e-4))
    policy = create_policy("expertflow", catalogue=setup.catalogue())

    setup.run(policy, scheduled_steps(trace, TokenScheduler(), Scheduling(2, 1, paths=source)), 6)

    assert (len(source.ran), sorted(source.ended), source.open) == (trace.tokens, [0, 1], set())


@pytest.mark.parametrize("name", sorted(BATCH_POLICIES))
@pytest.mark.parametrize("chunk", [None, 2])
def test_rows_of_an_encoder_and_the_decoders_prompt_run_apart(name: str, chunk: int | None) -> None:
    own = [Phase.ENCODE] * 3 + [Phase.PREFILL] * 2 + [Phase.DECODE] * 2
    phase = np.array(own * 3, dtype=np.uint8)
    experts = np.full((len(phase), 2, 1), 255, dtype=np.uint8)
    experts[phase == Phase.ENCODE, 0] = experts[phase != Phase.ENCODE, 1] = 1
    trace = RoutingTrace(experts, np.array([0, 7, 14, 21]), EXPERTS, phase=phase, decoder_start=1)

    steps = steps_of(trace, name, Scheduling(2, prefill_chunk=chunk))

    assert sum(len(each.step.sequences) for each in steps) == trace.tokens
    for each in steps:
        for sequence in np.unique(each.step.sequences):
            assert len(np.unique(each.step.phases[each.step.sequences == sequence])) == 1


def test_groups_by_known_paths_need_fewer_experts_than_fixed_ones() -> None:
    trace = traced([(0, 40)] * 8, prompts=False)

    def needed(policy: FcfsBatching | TokenScheduler) -> int:
        found = scheduled_steps(trace, policy, Scheduling(8, rows_per_forward=4, known=True))
        return sum(int(np.count_nonzero(np.asarray(each.paths).any(axis=0))) for each in found)

    assert needed(TokenScheduler()) < 0.97 * needed(FcfsBatching())


def test_it_ends_after_so_many_rows() -> None:
    trace = traced([(0, 3)] * 4, prompts=False)
    found = list(scheduled_steps(trace, FcfsBatching(), Scheduling(4), tokens=5))
    assert [len(each.step.sequences) for each in found] == [4, 4]


def test_what_can_not_be_foretold_or_run_is_refused() -> None:
    untold = RoutingTrace(np.zeros((2, 1, 1), dtype=np.uint8), np.array([0, 2]), 2)
    with pytest.raises(TraceError, match="no tokens"):
        next(scheduled_steps(untold, FcfsBatching(), Scheduling(1, paths=Own())))
    with pytest.raises(InvalidConfig, match="concurrent"):
        next(scheduled_steps(untold, FcfsBatching(), Scheduling(0)))
