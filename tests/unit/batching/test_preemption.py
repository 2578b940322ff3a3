"""KV that runs out while it grows: who gives it up, and that nobody sees a difference in the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.generation import FinishReason, SamplingParams
from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.batch.batch_engine import AuditError
from greenroom.policies.base.answer_lengths import AnswerLengths
from greenroom.policies.base.events import SequenceInfo
from greenroom.policies.batching.batch_policy import BatchDecision, BatchPolicy, BatchState
from greenroom.policies.batching.fcfs import FcfsBatching
from tests.contract.batching.harness import Answer, Driver, request
from tests.examples import examples
from tests.unit.batching.fake_model import FakeModel, continuation
from tests.unit.batching.recorder import Recorder

WIDE = KVLayout((LayerKV(1, 1, 1, 1),) * 64, torch.float32, torch.device("cpu"))
"""512 bytes a token: eight fill a page of the system."""
ROWS = 8


class WideModel(FakeModel):
    """Only its first two layers are written."""

    layout = WIDE


class Lengths(AnswerLengths):
    """Every answer is expected to have so many tokens, whatever was seen."""

    def __init__(self, tokens: float) -> None:
        super().__init__()
        self.tokens = tokens

    def held_mean(self, task: str) -> float | None:
        return self.tokens


def driver(rows: int, expected: float, **options: Any) -> Driver:
    options.setdefault("model", WideModel())
    return Driver(
        options.pop("model").as_ragged(), kv_budget=WIDE.nbytes(rows), lengths=Lengths(expected), **options
    )  # fmt: skip


def prompts(count: int) -> list[tuple[int, ...]]:
    return [(number + 1, number + 2, number + 3) for number in range(count)]


def run_all(d: Driver, asked: Sequence[tuple[tuple[int, ...], int]]) -> list[Answer]:
    answers = [d.add(request(f"r{i}", prompt, tokens)) for i, (prompt, tokens) in enumerate(asked)]
    d.run()
    for (prompt, tokens), answer in zip(asked, answers, strict=True):
        assert answer.ids == continuation(prompt, tokens)
        assert answer.finished is not None
        assert answer.finished.reason is FinishReason.LENGTH
        assert (answer.finished.prompt_tokens, answer.finished.generated_tokens) == (len(prompt), tokens)
    return answers


def test_chats_without_a_limit_run_side_by_side_where_one_would_reserve_everything() -> None:
    d = driver(rows=16 * ROWS, expected=8, max_model_len=16 * ROWS)
    answers = [d.add(request(f"r{i}", prompt, None)) for i, prompt in enumerate(prompts(5))]  # type: ignore[arg-type]
    d.step()
    assert len(d.engine.running) == 5
    for answer in answers:
        d.engine.cancel(answer.number)
    d.engine.audit()
    assert not d.engine.busy


def test_what_is_expected_of_those_that_run_is_not_given_to_others() -> None:
    d = driver(rows=16 * ROWS, expected=60, max_model_len=16 * ROWS)
    for i, prompt in enumerate(prompts(5)):
        d.add(request(f"r{i}", prompt, None))  # type: ignore[arg-type]
    d.step()
    assert (len(d.engine.running), len(d.engine.waiting)) == (2, 3)
    assert d.engine.kv.reserved_bytes < d.engine.kv.budget_bytes / 2


def test_what_one_is_expected_to_take_that_has_outlived_its_expectation_is_not_given_to_others() -> None:
    """After 90 tokens where 8 were expected it is expected to have 112. That leaves two pages; another needs three."""
    d = driver(rows=17 * ROWS, expected=8, max_model_len=17 * ROWS)
    long = d.add(request("long", (1, 2, 3), None))  # type: ignore[arg-type]
    while len(long.ids) < 90:
        d.step()
    late = d.add(request("late", (5, 6), 40))
    assert d.engine.kv.free_bytes == WIDE.nbytes(4 * ROWS)
    d.step()
    assert list(d.engine.waiting) == [late.number]
    d.run()
    assert d.engine.snapshot().preemptions == 0
    assert late.ids == continuation((5, 6), 40)


def test_where_all_grow_beyond_what_is_there_the_texts_are_what_they_were() -> None:
    recorder = Recorder()
    d = driver(rows=16 * ROWS, expected=2, observer=recorder)
    run_all(d, [(prompt, 60 + 7 * i) for i, prompt in enumerate(prompts(6))])
    stats = d.engine.snapshot()
    assert stats.preemptions > 0
    new_rows = stats.prefill_rows + stats.decode_rows - stats.recomputed_rows
    assert new_rows == sum(3 + 60 + 7 * i - 1 for i in range(6))
    assert stats.prefill_rows - stats.recomputed_rows == 6 * 3 + stats.preemptions, "each has one row that is due"
    assert (stats.started, stats.submitted) == (6, 6)
    told = Counter(what[0] for what in recorder.told)
    assert told["preempted"] == stats.preemptions
    assert told["started"] == 6 + stats.preemptions
    assert told["ended"] == told["queued"] == 6
    times = Counter(what[1].sequence for what in recorder.told if what[0] == "preempted")
    assert max(times.values()) <= 2
    assert 0 not in times, "the one admitted longest ago is never preempted"


def test_nobody_gives_way_because_the_system_has_no_memory_for_another_one() -> None:
    d = driver(rows=64 * ROWS, expected=2)
    running = [d.add(request(f"r{i}", prompt, 60)) for i, prompt in enumerate(prompts(2))]
    d.step()
    d.engine.kv.short = True
    waiting = d.add(request("waiting", (7, 8), 5))
    for _ in range(40):
        d.step()
    assert list(d.engine.waiting) == [waiting.number]
    d.run()
    assert d.engine.snapshot().preemptions == 0
    assert [answer.ids for answer in running] == [continuation(prompt, 60) for prompt in prompts(2)]
    assert waiting.ids == continuation((7, 8), 5)


def test_every_row_runs_once_but_for_those_that_are_counted_as_run_again() -> None:
    model = WideModel()
    d = driver(rows=12 * ROWS, expected=2, model=model)
    run_all(d, [(prompt, 50) for prompt in prompts(4)])
    stats = d.engine.snapshot()
    rows = sum(count for forward in model.forwards for _, count in forward)
    assert stats.recomputed_rows > 0
    assert rows - stats.recomputed_rows == 4 * (3 + 50 - 1)


def test_one_that_was_preempted_twice_reserves_all_and_comes_before_those_that_came_later() -> None:
    d = driver(rows=16 * ROWS, expected=2)
    first = d.add(request("first", (1, 2), 90))
    second = d.add(request("second", (3, 4), 60))
    d.step()
    sequence = d.engine.running[second.number]
    for count in (1, 2):
        d.engine._preempt(d.engine.running[second.number])
        third = d.add(request(f"third{count}", (5, 6), 3))
        assert list(d.engine.waiting)[:2] == [second.number, third.number] or count == 2
        d.step()
        d.step()
        assert second.number in d.engine.running
    assert sequence.preempted == 2
    assert sequence.kv is not None
    assert sequence.kv.capacity == sequence.kv_rows == 61
    d.run()
    assert first.ids == continuation((1, 2), 90)
    assert second.ids == continuation((3, 4), 60)
    assert sequence.preempted == 2


class Counting:
    def __init__(self, sampling: SamplingParams) -> None:
        self.left = int(sampling.stop[0])
        self.seen: list[int] = []

    def push(self, token_id: int) -> bool:
        self.seen.append(token_id)
        return len(self.seen) == self.left


def test_the_stop_checker_is_not_fed_again() -> None:
    made: list[Counting] = []

    def factory(sampling: SamplingParams) -> Counting:
        made.append(Counting(sampling))
        return made[-1]

    d = driver(rows=32 * ROWS, expected=2, stop_checkers=factory)
    d.add(request("first", (9, 8), 60))
    answer = d.add(request("a", (5, 6), 50, stop=("20",)))
    for _ in range(9):
        d.step()
    d.engine._preempt(d.engine.running[answer.number])
    d.run()
    assert answer.ids == tuple(made[0].seen) == continuation((5, 6), 20)
    assert answer.finished is not None
    assert answer.finished.reason is FinishReason.STOP


def test_draws_go_on_where_they_were() -> None:
    alone = Driver(WideModel().as_ragged())
    undisturbed = alone.add(request("a", (5, 6), 30, temperature=1.0, seed=3))
    alone.run()
    d = driver(rows=32 * ROWS, expected=2)
    d.add(request("first", (9, 8), 60))
    answer = d.add(request("a", (5, 6), 30, temperature=1.0, seed=3))
    for _ in range(11):
        d.step()
    d.engine._preempt(d.engine.running[answer.number])
    d.run()
    assert answer.ids == undisturbed.ids


def test_a_preempted_one_can_be_cancelled_and_a_prompt_half_read_begins_anew() -> None:
    model = WideModel()
    d = driver(rows=32 * ROWS, expected=2, model=model, prefill_chunk=4)
    first = d.add(request("first", (9, 8), 30))
    cancelled = d.add(request("cancelled", (5, 6), 30))
    reading = d.add(request("reading", tuple(range(3, 23)), 4))
    for _ in range(3):
        d.step()
    for answer in (cancelled, reading):
        d.engine._preempt(d.engine.running[answer.number])
    d.engine.audit()
    d.engine.cancel(cancelled.number)
    d.run()
    assert cancelled.ids == continuation((5, 6), len(cancelled.ids))
    assert reading.ids == continuation(tuple(range(3, 23)), 4)
    assert first.ids == continuation((9, 8), 30)
    assert d.engine.snapshot().recomputed_rows == 12


@pytest.mark.parametrize("again", [False, True])
def test_rows_of_a_prompt_count_as_prefilled_once_and_those_of_the_answer_never(again: bool) -> None:
    """Also of one that is cancelled while it waits for its memory."""
    d = driver(rows=32 * ROWS, expected=2)
    d.add(request("first", (9, 8), 60))
    answer = d.add(request("a", (5, 6, 7), 50))
    while len(answer.ids) < 12:
        d.step()
    d.engine._preempt(d.engine.running[answer.number])
    for _ in range(5 * again):
        d.step()
    assert (answer.number in d.engine.running) == again
    d.engine.cancel(answer.number)
    assert answer.finished is not None
    assert answer.finished.prefilled == 3


def test_a_request_of_the_longest_length_fits_alone() -> None:
    rows = 16 * ROWS
    d = driver(rows=rows, expected=2)
    assert d.engine.max_model_len == rows + 1
    run_all(d, [((1, 2, 3), rows + 1 - 3), ((4, 5, 6), rows + 1 - 3)])


def test_what_is_learnt_from_answers_lets_more_of_those_that_wait_start() -> None:
    d = Driver(WideModel().as_ragged(), kv_budget=WIDE.nbytes(100 * ROWS), max_model_len=100 * ROWS, max_running=40)
    eos = continuation((1, 2, 3), 4)[-1]
    d.engine._eos_token_ids = frozenset([eos])
    for i in range(20):
        d.add(request(f"r{i}", (1, 2, 3), None, ignore_eos=False))  # type: ignore[arg-type]
    d.step()
    cold = len(d.engine.running)
    assert cold < 20, "an answer of 64 tokens is expected of each"
    d.run()
    answers = [d.add(request(f"s{i}", (1, 2, 3), None, ignore_eos=False)) for i in range(20)]  # type: ignore[arg-type]
    d.step()
    assert len(d.engine.running) == 20
    d.run()
    assert all(answer.ids == continuation((1, 2, 3), 4) for answer in answers)


class Mistaken(AnswerLengths):
    """A profile that expects 3 tokens of every answer."""

    def mean(self, task: str) -> float | None:
        return 3.0


def test_a_profile_that_expects_too_little_costs_rows_until_answers_were_seen() -> None:
    """Before what is seen was heeded, a quarter of all rows ran twice, however long it went on."""
    d = Driver(WideModel().as_ragged(), kv_budget=WIDE.nbytes(40 * ROWS), max_model_len=200, lengths=Mistaken())
    for i in range(60):
        d.add(request(f"r{i}", (1, 2, i), 40))
    while d.engine.step():
        pass
    d.engine.audit()
    stats = d.engine.snapshot()
    assert stats.finished[FinishReason.LENGTH] == 60
    assert stats.recomputed_rows <= 0.1 * (stats.rows - stats.recomputed_rows)


def test_requests_for_one_token_do_not_teach_that_all_answers_are_short() -> None:
    d = Driver(WideModel().as_ragged(), kv_budget=WIDE.nbytes(100 * ROWS), max_model_len=100 * ROWS, max_running=40)
    for i in range(30):
        d.add(request(f"probe{i}", (1, 2, 3), 1))
    d.run()
    for i in range(30):
        d.add(request(f"chat{i}", (1, 2, 3), None))  # type: ignore[arg-type]
    d.step()
    assert len(d.engine.running) == 100 * ROWS // (9 * ROWS), "64 tokens are expected of each: nine pages"


class Overdrawn(BatchPolicy):
    """Plans rows that there is no room for."""

    def decide(self, state: BatchState) -> BatchDecision:
        free = BatchState(state.waiting, state.running, 1 << 40, state.limits)
        return FcfsBatching().decide(free)


def test_a_policy_that_plans_more_than_there_is_is_told_so() -> None:
    d = driver(rows=8 * ROWS, expected=2, policy=Overdrawn())
    for i, prompt in enumerate(prompts(3)):
        d.add(request(f"r{i}", prompt, 50))
    with pytest.raises(ValueError, match="more bytes asked for"):
        d.run()


def test_the_audit_finds_one_without_room_that_nobody_knows_of() -> None:
    d = driver(rows=32 * ROWS, expected=2)
    d.add(request("a", (1, 2), 60))
    d.step()
    sequence = next(iter(d.engine.running.values()))
    assert sequence.kv is not None
    d.engine._full[sequence.number] = sequence
    with pytest.raises(AuditError, match="have no room"):
        d.engine.audit()
    d.engine._full.clear()
    sequence.preempted = 3
    d.engine._described.runs(sequence)
    with pytest.raises(AuditError, match="3 times"):
        d.engine.audit()


class Told:
    """Refuses an observer's word that does not fit what it was told before."""

    def __init__(self) -> None:
        self.state: dict[int, str] = {}

    def _turn(self, number: int, before: str | None, after: str) -> None:
        assert self.state.get(number) == before, f"{number} is {self.state.get(number)}, and now {after}"
        self.state[number] = after

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        self._turn(sequence.sequence, None, "waits")

    def sequence_started(self, sequence: SequenceInfo) -> None:
        self._turn(sequence.sequence, "waits", "runs")

    def sequence_preempted(self, sequence: SequenceInfo) -> None:
        self._turn(sequence.sequence, "runs", "waits")

    def sequence_ended(self, sequence: int, end: object) -> None:
        self.state[sequence] = "ended"

    def approximated(self, sequence: int, rows: int) -> float:
        return 0.0

    def idle(self) -> bool:
        return False

    def audit_idle(self) -> None:
        pass


@settings(max_examples=examples(60), deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 80), st.integers(0, 60)), min_size=1, max_size=10),
    pages=st.integers(16, 40),
    expected=st.floats(1, 50),
    chunk=st.none() | st.integers(1, 9),
    running=st.integers(1, 8),
)
def test_whatever_comes_every_text_is_the_one_it_would_be_alone(
    asked: list[tuple[int, int, int]], pages: int, expected: float, chunk: int | None, running: int
) -> None:
    """``asked``: tokens of prompt and answer, and the step before which it comes."""
    told = Told()
    limits = {"prefill_chunk": chunk, "max_running": running, "tokens_per_step": 48}
    d = driver(rows=pages * ROWS, expected=expected, observer=told, **limits)
    answers: dict[int, Answer] = {}
    for step in range(4000):
        for i, (prompt, tokens, at) in enumerate(asked):
            if at == step:
                answers[i] = d.add(request(f"r{i}", tuple((i + k) % 60 for k in range(prompt)), tokens))
        if not d.step() and step > 60:
            break
    assert not d.engine.busy
    assert d.engine.stats.observer_failures == 0
    for i, (prompt, tokens, _) in enumerate(asked):
        assert answers[i].ids == continuation(tuple((i + k) % 60 for k in range(prompt)), tokens)
    assert set(told.state.values()) == {"ended"}
