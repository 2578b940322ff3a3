"""One step after another by hand: what a request may do to itself, and what it can not do to others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from greenroom.core.errors import BudgetTooSmall, InvalidConfig, InvalidRequest, TransferFailed
from greenroom.core.generation import Event, FinishReason, SamplingParams, Token
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import AuditError, BatchEngine
from greenroom.policies.base.events import SequenceEnd, SequenceInfo
from greenroom.policies.batching.batch_policy import BatchDecision, BatchPolicy, BatchState, StepPlan
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.batching.phases import PhasesBatching
from tests.contract.batching.harness import Answer, Driver, request
from tests.unit.batching.fake_model import LAYOUT, FakeModel, continuation, next_logits, poisoned
from tests.unit.batching.recorder import Recorder

POISON = 60


def driver(model: FakeModel | None = None, **options: Any) -> Driver:
    return Driver((model or FakeModel()).as_ragged(), **options)


def reason_of(answer: Answer) -> FinishReason:
    assert answer.finished is not None
    return answer.finished.reason


# -- ends ----------------------------------------------------------------------------------------------------


def test_a_request_ends_at_its_length() -> None:
    d = driver()
    answer = d.add(request("a", (5, 6), 4))
    d.run()
    assert answer.ids == continuation((5, 6), 4)
    assert reason_of(answer) is FinishReason.LENGTH


def test_max_tokens_none_goes_on_to_the_limit() -> None:
    d = driver(max_model_len=12)
    answer = d.add(request("a", (5, 6), None))  # type: ignore[arg-type]
    d.run()
    assert answer.ids == continuation((5, 6), 10)


@pytest.mark.parametrize("where", [0, 2])
def test_an_end_of_sequence_token_ends_it_and_is_its_last(where: int) -> None:
    eos = continuation((5, 6), 5)[where]
    d = driver(eos_token_ids=[eos])
    answer = d.add(request("a", (5, 6), 5, ignore_eos=False))
    ignoring = d.add(request("b", (5, 6), 5, ignore_eos=True))
    d.run()
    assert answer.ids == continuation((5, 6), where + 1)
    assert reason_of(answer) is FinishReason.STOP
    assert ignoring.ids == continuation((5, 6), 5)


def test_stop_token_ids_hold_even_where_the_end_of_sequence_is_ignored() -> None:
    stop = continuation((5, 6), 5)[1]
    d = driver(eos_token_ids=[stop])
    answer = d.add(request("a", (5, 6), 5, ignore_eos=True, stop_token_ids=(stop,)))
    d.run()
    assert answer.ids == continuation((5, 6), 2)
    assert reason_of(answer) is FinishReason.STOP


class Counting:
    """Stops at the n-th token, n being the stop string."""

    def __init__(self, params: SamplingParams) -> None:
        self.left = int(params.stop[0])
        self.seen: list[int] = []

    def push(self, token_id: int) -> bool:
        self.seen.append(token_id)
        if self.left == len(self.seen) == 3:
            raise LookupError("no such token")
        return len(self.seen) == self.left


def test_a_stop_checker_sees_every_token_and_ends_it() -> None:
    made: list[Counting] = []

    def factory(params: SamplingParams) -> Counting:
        made.append(Counting(params))
        return made[-1]

    d = driver(stop_checkers=factory)
    answer = d.add(request("a", (5, 6), 5, stop=("2",)))
    d.add(request("b", (5, 7), 5))
    d.run()
    assert answer.ids == tuple(made[0].seen) == continuation((5, 6), 2)
    assert reason_of(answer) is FinishReason.STOP
    assert len(made) == 1, "a request without stop strings needs no checker"


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        (request("a", ()), "prompt", "no tokens"),
        (request("a", (1, 64)), "prompt", "from 0 to 63"),
        (request("a", (-1,)), "prompt", "from 0 to 63"),
        (request("a", (1,) * 20, 1), "prompt", "may have 20 tokens in all; this one has 20 in the prompt"),
        (request("a", (1,) * 20, None), "prompt", "1 for the answer"),  # type: ignore[arg-type]
        (request("a", (1,) * 15, 6), "max_tokens", "15 in the prompt and max_tokens=6"),
        (request("a", (1,), 10**12), "max_tokens", "max_tokens=1000000000000"),
        (request("a", (1,), 5, stop=("x",)), "stop", "tokenizer"),
    ],
)
def test_what_can_never_be_served_is_refused_by_name(asked: Any, param: str, message: str) -> None:
    engine = driver(max_model_len=20).engine
    with pytest.raises(InvalidRequest, match=message) as caught:
        engine.new_sequence(asked, lambda event: None)
    assert caught.value.param == param
    assert not engine.busy
    assert engine.snapshot().submitted == 0


def test_the_kv_budget_bounds_the_length_and_says_so() -> None:
    rows = 256  # of 16 bytes: one page
    engine = driver(kv_budget=LAYOUT.nbytes(rows)).engine
    assert engine.max_model_len == rows + 1
    engine.new_sequence(request("a", (1,) * 200, 57), lambda event: None)
    with pytest.raises(InvalidRequest, match=r"257 tokens in all \(the KV budget of 4 KiB holds no more\)"):
        engine.new_sequence(request("a", (1,) * 200, 58), lambda event: None)


def test_limits_that_can_not_be_kept_are_refused_at_the_start() -> None:
    with pytest.raises(BudgetTooSmall, match=r"holds 257 tokens of 16 bytes; a request of 500 needs 8 KiB"):
        driver(kv_budget=4096, max_model_len=500)
    with pytest.raises(BudgetTooSmall, match="holds 1 tokens"):
        driver(kv_budget=100)
    with pytest.raises(InvalidConfig, match="at most 1000"):
        driver(max_model_len=1001)
    with pytest.raises(InvalidConfig, match="max_waiting"):
        BatchConfig(4096, max_waiting=-1)
    with pytest.raises(InvalidConfig, match="max_running"):
        BatchConfig(4096, max_running=9, tokens_per_step=8)


# -- scheduling ----------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_waits_until_another_has_left() -> None:
    model = FakeModel()
    d = driver(model, kv_budget=2 * 4096)
    first = d.add(request("a", (1,) * 200, 3))
    second = d.add(request("b", (2,) * 250, 50))  # two pages
    d.step()
    assert first.ids == continuation((1,) * 200, 1)
    assert (len(d.engine.running), len(d.engine.waiting)) == (1, 1)
    d.step()
    assert second.tokens == []
    d.run()
    assert second.ids == continuation((2,) * 250, 50)
    assert d.engine.kv.peak_bytes == 2 * 4096


def test_prompts_go_in_chunks_beside_rows_that_decode() -> None:
    model = FakeModel()
    d = driver(model, tokens_per_step=4, prefill_chunk=3)
    first = d.add(request("a", (1, 2), 6))
    d.step()
    second = d.add(request("b", (3, 4, 5, 6, 7), 2))
    d.run()
    assert model.forwards[1:4] == [[(0, 1), (1, 3)], [(0, 1), (1, 2)], [(0, 1), (1, 1)]]
    assert first.ids == continuation((1, 2), 6)
    assert second.ids == continuation((3, 4, 5, 6, 7), 2)
    stats = d.engine.snapshot()
    assert (stats.prefill_rows, stats.decode_rows) == (7, 5 + 1)
    assert stats.generated_tokens == 8


def test_a_waiting_and_a_running_request_can_be_cancelled() -> None:
    d = driver(max_running=1)
    running = d.add(request("a", (1, 2), 9))
    waiting = d.add(request("b", (3,), 9))
    d.step()
    d.engine.cancel(waiting.number)
    d.engine.cancel(running.number)
    d.engine.cancel(running.number)
    d.engine.cancel(12345)
    assert not d.engine.busy
    d.engine.audit()
    assert (reason_of(running), reason_of(waiting)) == (FinishReason.CANCELLED, FinishReason.CANCELLED)
    assert running.ids == continuation((1, 2), 1)
    assert d.engine.kv.reserved_bytes == 0


class TwoAtOnce(BatchPolicy):
    """Plans every decision twice over: rows of the second half in a step of their own."""

    def decide(self, state: BatchState) -> BatchDecision:
        decision = FcfsBatching().decide(state)
        if not decision.steps:
            return decision
        rows = decision.steps[0].rows
        return BatchDecision(
            tuple(StepPlan(part) for part in (rows[1:], rows[:1]) if part), decision.admit, decision.refuse
        )


def test_a_policy_may_plan_several_steps_at_once() -> None:
    model = FakeModel()
    d = driver(model, policy=TwoAtOnce())
    answers = [d.add(request(f"r{i}", (i, i + 1), 4)) for i in range(3)]
    d.run()
    assert [answer.ids for answer in answers] == [continuation((i, i + 1), 4) for i in range(3)]
    assert model.forwards[0] == [(1, 2), (2, 2)]
    assert model.forwards[1] == [(0, 2)]


def test_a_later_step_of_a_plan_does_without_those_that_have_ended() -> None:
    d = driver(policy=TwoAtOnce())
    answers: list[Answer] = []

    def cancels_the_first(event: Event) -> None:
        d.engine.cancel(answers[0].number)

    answers.append(d.add(request("r0", (1, 2), 4)))
    sequence = d.engine.new_sequence(request("r1", (1, 3), 1), cancels_the_first)
    d.engine.add(sequence)
    d.run()
    assert reason_of(answers[0]) is FinishReason.CANCELLED
    assert answers[0].tokens == []


class Refusing(BatchPolicy):
    def decide(self, state: BatchState) -> BatchDecision:
        return BatchDecision(refuse=tuple((waiting.sequence, "not today") for waiting in state.waiting))


def test_what_a_policy_refuses_fails_with_its_reason() -> None:
    d = driver(policy=Refusing())
    answer = d.add(request("a", (1,), 4))
    d.run()
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.error) == (FinishReason.FAILED, "not today")


# -- failures ------------------------------------------------------------------------------------------------


def test_a_forward_that_one_request_breaks_costs_only_that_request() -> None:
    model = FakeModel(poisoned(POISON, TransferFailed("expert 3 of layer 1 can not be read")))
    d = driver(model, tokens_per_step=6, prefill_chunk=2)
    answers = [d.add(request(f"r{i}", (i, 7, 9), 6)) for i in range(3)]
    d.step()
    bad = d.add(request("bad", (1, 2, POISON), 6))
    d.run()
    assert [answer.ids for answer in answers] == [continuation((i, 7, 9), 6) for i in range(3)]
    assert bad.finished is not None
    assert bad.finished.reason is FinishReason.FAILED
    assert bad.finished.error == "expert 3 of layer 1 can not be read"
    assert bad.tokens == []
    assert d.engine.snapshot().isolated_steps == 1


def test_a_failure_that_does_not_come_again_costs_no_request() -> None:
    failures = [TransferFailed("once"), TransferFailed("twice")]

    def before(chunks: Sequence[Chunk]) -> None:
        if failures and len(chunks) > 1:
            raise failures.pop()

    d = driver(FakeModel(before))
    answers = [d.add(request(f"r{i}", (i, 7, 9), 6)) for i in range(3)]
    d.run()
    assert [answer.ids for answer in answers] == [continuation((i, 7, 9), 6) for i in range(3)]
    assert failures == []
    assert d.engine.snapshot().isolated_steps == 2


def test_a_defect_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    d = driver(FakeModel(poisoned(POISON, ZeroDivisionError("secret"))))
    bad = d.add(request("bad", (POISON,), 6))
    with caplog.at_level(logging.ERROR):
        d.run()
    assert bad.finished is not None
    assert bad.finished.error == "internal error (ZeroDivisionError)"
    assert "secret" in caplog.text


def test_logits_that_are_no_numbers_fail_their_own_request() -> None:
    class Broken(FakeModel):
        def forward(self, chunks: Sequence[Chunk], paths: object = None) -> torch.Tensor:
            logits = super().forward(chunks)
            for row, chunk in enumerate(chunk for chunk in chunks if chunk.wants_logits):
                if chunk.sequence == 1 and chunk.kv.length > 3:
                    logits[row, 5] = torch.nan
            return logits

    d = driver(Broken())
    answers = [d.add(request(f"r{i}", (i, 7, 9), 6)) for i in range(3)]
    d.run()
    assert [reason_of(answer) for answer in answers] == [FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH]
    assert answers[1].ids == continuation((1, 7, 9), 2)
    assert answers[1].finished is not None
    assert answers[1].finished.error == "the model computed nan as the largest logit of token 5"


@pytest.mark.parametrize(
    "changes",
    [{"repetition_penalty": 1e-300}, {"min_tokens": 2, "stop_token_ids": tuple(range(64))}],
    ids=["infinite logits", "nothing left"],
)
def test_a_request_that_leaves_itself_no_token_is_at_fault(changes: dict[str, Any]) -> None:
    d = driver()
    bad = d.add(request("bad", (1, 2), 4, **changes))
    good = d.add(request("good", (1, 3), 4))
    d.run()
    assert bad.finished is not None
    assert (bad.finished.reason, bad.finished.invalid, bad.ids) == (FinishReason.FAILED, True, ())
    assert "the request's penalties, logit_bias and min_tokens" in (bad.finished.error or "")
    assert good.ids == continuation((1, 3), 4)
    assert good.finished is not None
    assert not good.finished.invalid


def test_a_stop_checker_that_fails_fails_its_own_request() -> None:
    d = driver(stop_checkers=Counting)
    bad = d.add(request("bad", (1, 2), 5, stop=("3",)))
    good = d.add(request("good", (1, 3), 5, stop=("4",)))
    d.run()
    assert reason_of(bad) is FinishReason.FAILED
    assert bad.finished is not None
    assert (bad.finished.generated_tokens, bad.ids) == (2, continuation((1, 2), 2))
    assert good.ids == continuation((1, 3), 4)


def test_a_request_whose_events_can_not_be_delivered_is_cancelled() -> None:
    d = driver()
    told: list[Event] = []

    def closed(event: Event) -> None:
        told.append(event)
        if len(told) == 2:
            raise RuntimeError("the event loop is closed")

    d.engine.add(d.engine.new_sequence(request("gone", (1, 2), 9), closed))
    good = d.add(request("good", (1, 3), 5))
    d.run()
    assert [isinstance(event, Token) for event in told] == [True, True, False]
    assert d.engine.snapshot().finished[FinishReason.CANCELLED] == 1
    assert good.ids == continuation((1, 3), 5)


def test_abort_fails_all() -> None:
    d = driver(max_running=1)
    answers = [d.add(request(f"r{i}", (i,), 9)) for i in range(3)]
    d.step()
    d.engine.abort("the model has failed")
    d.engine.audit()
    assert not d.engine.busy
    assert all(answer.finished and answer.finished.error == "the model has failed" for answer in answers)


# -- what others are told ------------------------------------------------------------------------------------


def test_observers_are_told_of_each_life() -> None:
    recorder = Recorder()
    d = driver(FakeModel(poisoned(POISON, TransferFailed("gone"))), max_running=2, observer=recorder)
    d.add(request("a", (1, 2), 3))
    d.add(request("bad", (POISON,), 3))
    never = d.add(request("never", (4,), 3))
    d.engine.cancel(never.number)
    d.run()
    info = [SequenceInfo(0, "unknown", 2, 3), SequenceInfo(1, "unknown", 1, 3), SequenceInfo(2, "unknown", 1, 3)]
    assert recorder.told == [
        ("queued", info[0]),
        ("queued", info[1]),
        ("queued", info[2]),
        ("ended", 2, SequenceEnd.CANCELLED),
        ("started", info[0]),
        ("started", info[1]),
        ("ended", 1, SequenceEnd.FAILED),
        ("ended", 0, SequenceEnd.FINISHED),
    ]


def test_an_observer_that_fails_is_counted_and_costs_no_request() -> None:
    d = driver(observer=Recorder(fail=True))
    answer = d.add(request("a", (1, 2), 3))
    d.run()
    assert answer.ids == continuation((1, 2), 3)
    assert d.engine.snapshot().observer_failures == 3


def test_counts_add_up_and_a_snapshot_stays() -> None:
    now = [100.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    d = driver(clock=clock, max_running=1)
    for i in range(3):
        d.add(request(f"r{i}", (i, i), 2))
    early = d.engine.snapshot()
    d.run()
    late = d.engine.snapshot()
    assert (early.submitted, early.waiting, early.steps) == (3, 3, 0)
    assert (late.submitted, late.started, late.waiting, late.running) == (3, 3, 0, 0)
    assert late.finished[FinishReason.LENGTH] == 3
    assert early.finished[FinishReason.LENGTH] == 0
    assert (late.steps, late.rows, late.step_seconds) == (6, 9, 3.0)
    assert late.queue_seconds > 0
    assert (late.kv_reserved_bytes, late.kv_peak_bytes) == (0, 4096)


def test_the_audit_finds_what_is_wrong() -> None:
    def broken() -> tuple[BatchEngine, Any]:
        d = driver()
        d.add(request("a", (1, 2), 9))
        d.step()
        sequence = next(iter(d.engine.running.values()))
        return d.engine, sequence

    engine, sequence = broken()
    engine.waiting[sequence.number] = sequence
    with pytest.raises(AuditError, match="wait and run"):
        engine.audit()
    engine, sequence = broken()
    engine.running.clear()
    with pytest.raises(AuditError, match="0 sequences run, 0 hold KV, 1 are reserved"):
        engine.audit()
    engine, sequence = broken()
    sequence.tokens.pop()
    with pytest.raises(AuditError, match="2 rows of 2"):
        engine.audit()


def test_the_fake_model_is_worth_testing_with() -> None:
    assert len({continuation((i, 5), 6) for i in range(20)}) == 20
    assert len(set(next_logits((1, 2)).tolist())) > 50


# -- forwards planned together -----------------------------------------------------------------------------------


def test_the_model_is_told_of_the_forward_after_the_one_that_is_about_to_start() -> None:
    model = FakeModel()
    d = driver(model, policy=PhasesBatching(apart=True), tokens_per_step=8)
    d.add(request("a", (5, 6), 8))
    d.step()
    assert model.plans == [], "a forward alone has none after it"
    d.add(request("b", (7, 8, 9), 8))
    d.step()
    assert model.forwards == [[(0, 2)], [(1, 3)], [(0, 1)]]
    assert model.plans == [(1, [(0, list(continuation((5, 6), 1)))])], "before the prompt's own forward"


def test_what_is_told_of_the_next_forward_but_one_is_what_runs_then_whoever_has_left_meanwhile() -> None:
    """Between the round's first forward and its second, of one row each, all rows of the second are cancelled."""
    told: list[tuple[int, list[int]]] = []

    class Model(FakeModel):
        def plan(self, chunks: Sequence[Chunk], paths: object = None) -> None:
            told.append((len(self.forwards) + 1, [chunk.sequence for chunk in chunks]))

    model = Model()
    d = driver(model, tokens_per_step=16, rows_per_forward=1)
    answers = [d.add(request(name, (5, 6), 9)) for name in "abc"]
    d.step()
    told.clear()
    d.engine.between_forwards = lambda: d.engine.cancel(answers[1].number)
    d.step()
    d.engine.between_forwards = None

    assert [[sequence for sequence, _ in forward] for forward in model.forwards[-2:]] == [[0], [2]]
    ran = {number: [sequence for sequence, _ in forward] for number, forward in enumerate(model.forwards)}
    assert told == [(len(ran) - 1, [1])], "of the second before the first; nothing of the third in its place"


def test_a_model_that_can_not_take_a_plan_costs_no_token() -> None:
    class Deaf(FakeModel):
        def plan(self, chunks: Sequence[Chunk], paths: object = None) -> None:
            raise RuntimeError("no")

    d = driver(Deaf(), policy=PhasesBatching(apart=True), tokens_per_step=8)
    first = d.add(request("a", (5, 6), 8))
    d.step()
    second = d.add(request("b", (7, 8, 9), 8))
    d.run()
    assert (first.ids, second.ids) == (continuation((5, 6), 8), continuation((7, 8, 9), 8))
    assert d.engine.stats.observer_failures == 1
