"""The scheduler's rules, one by one. docs/architecture/protocol.md has them by number."""

from __future__ import annotations

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason
from greenroom.core.messages import Cancel, Claim, Lost, Rejected
from greenroom.scheduler.config import PoolConfig
from greenroom.scheduler.effects import (
    Append,
    CancelRun,
    Deposed,
    Disconnect,
    Effect,
    ListRuns,
    Release,
    Run,
    WriteDeadLetter,
)
from greenroom.scheduler.pool import Listed
from greenroom.scheduler.pool_state import Role
from greenroom.scheduler.pool_workers import Capacity
from greenroom.scheduler.request_entries import RunResult
from tests.unit.protocol.pool_bench import CONFIG, DONE, Bench


def of(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


# 1 and the plain path


def test_a_request_is_run_and_its_outcome_written_and_committed() -> None:
    bench = Bench()
    bench.worker()
    [run] = of(bench.task(), Run)
    assert isinstance(run, Run)
    assert run.attempt.epoch == 0
    bench.do(bench.pool.result("w", "r", run.attempt, DONE, bench.now))
    assert bench.pool.tracker.position == 0, "what was appended has not happened before it is read"
    bench.land()
    [outcome] = bench.outcomes()
    assert (outcome.request_id, outcome.token_ids, outcome.attempt) == ("r", (7, 8), run.attempt)
    assert bench.pool.tracker.position == 1
    assert of(bench.wanted, Release)


def test_a_result_of_an_attempt_that_is_not_the_requests_is_passed_over() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    run = bench.last_run()
    assert bench.pool.result("w", "r", Attempt(run.attempt.epoch, run.attempt.n + 1), DONE, bench.now) == []
    assert bench.pool.result("other", "r", run.attempt, DONE, bench.now) == []


# 2: one active scheduler


def test_nothing_is_run_before_the_claim_was_read_back() -> None:
    bench = Bench(active=False)
    bench.pool.take_over(0, 0)
    bench.do(bench.pool.claim(bench.now))
    assert not bench.pool.wants_tasks
    bench.land()
    assert bench.pool.epoch == 0
    assert bench.pool.wants_tasks


def test_a_void_claim_is_made_again_with_what_has_been_read_since() -> None:
    bench = Bench(active=False)
    bench.pool.take_over(0, 0)
    [mine] = bench.do(bench.pool.claim(bench.now))
    bench.read(Claim(scheduler="other", read_to=0))
    assert bench.pool.role is Role.CLAIMING
    assert isinstance(mine, Append)
    bench.pending.clear()
    [again] = bench.read(mine.record)
    assert again == Append(Claim(scheduler="me", read_to=2))
    bench.land()
    assert bench.pool.epoch == 2


def test_a_claim_that_never_lands_is_made_again() -> None:
    bench = Bench(active=False)
    bench.pool.take_over(0, 0)
    bench.do(bench.pool.claim(bench.now))
    assert not of(bench.pass_ms(500), Append), "while it is on its way it is not made again"
    bench.fail()
    assert of(bench.pass_ms(60), Append)


def test_anothers_claim_that_stands_deposes() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    assert bench.read(Claim(scheduler="other", read_to=len(bench.journal))) == [Deposed("other")]
    assert bench.pool.role is Role.STANDBY
    assert not bench.pool.wants_tasks
    assert bench.pass_ms(1000) == []


def test_the_holder_claims_anew_and_writes_again_what_was_on_its_way() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    [under_the_old] = bench.pending
    bench.pending.clear()
    bench.read(Claim(scheduler="me", read_to=len(bench.journal)))
    assert bench.pool.epoch == 1
    bench.read(under_the_old)
    assert bench.pool.tracker.position == 0, "the late one is void"
    assert not bench.pending, "one is on its way still"
    bench.end(under_the_old)
    bench.land()
    assert bench.pool.tracker.position == 1


@pytest.mark.parametrize(
    ("reason", "share"), [(FinishReason.STOP, 0.25), (FinishReason.LENGTH, 0.25), (FinishReason.FAILED, 0.0)]
)
def test_an_outcome_says_what_was_approximated_of_an_answer(reason: FinishReason, share: float) -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, RunResult(reason, 3, (7,), approximated=0.25), 0))
    bench.land()
    assert [outcome.approximated for outcome in bench.outcomes()] == [share]


def test_an_outcome_that_does_not_land_is_appended_again() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    bench.fail()
    assert [effect for effect in bench.pass_ms(60, alive=("w",)) if isinstance(effect, Append)]
    bench.land()
    assert bench.pool.tracker.position == 1


def test_one_append_of_an_outcome_is_on_its_way_however_long_it_takes() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    assert not of(bench.pass_ms(10 * CONFIG.retry_ms, alive=("w",)), Append), "its append has not ended"
    bench.fail()
    assert not of(bench.pass_ms(0.7 * CONFIG.retry_ms, alive=("w",)), Append), "the next counts from its end"
    assert len(of(bench.pass_ms(10 * CONFIG.retry_ms, alive=("w",)), Append)) == 1
    bench.land()
    assert bench.pool.tracker.position == 1


def test_one_append_of_a_loss_is_on_its_way_however_long_it_takes() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    lose(bench, "w")
    assert not of(bench.pass_ms(10 * CONFIG.retry_ms), Append)
    bench.fail()
    assert len(of(bench.pass_ms(10 * CONFIG.retry_ms), Append)) == 1
    bench.land()
    assert len(bench.pool.entries["r"].losses) == 1


def test_a_failed_outcome_without_tokens_takes_the_place_of_one_that_the_journal_refuses() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    bench.end(bench.pending.pop(), refused=True)
    bench.land()
    [outcome] = bench.outcomes()
    assert (outcome.reason, outcome.token_ids, outcome.logprobs) == (FinishReason.FAILED, (), None)
    assert "larger than the journal takes" in outcome.message
    assert bench.pool.tracker.position == 1
    assert not bench.pool.workers["w"].placed


def test_a_journal_that_refuses_everything_is_not_asked_without_a_pause() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    bench.end(bench.pending.pop(), refused=True)
    assert not bench.end(bench.pending.pop(), refused=True)
    assert len(of(bench.pass_ms(60, alive=("w",)), Append)) == 1


def test_a_second_outcome_changes_nothing() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    [first] = bench.pending
    bench.land()
    assert bench.read(first) == []


# 3: attaching


def test_a_successor_asks_what_runs_before_it_starts_anything() -> None:
    bench = Bench(active=False)
    bench.pool.take_over(0, 0)
    bench.pool.expect_worker("w")
    bench.do(bench.pool.claim(bench.now))
    bench.land()
    assert of(bench.task(), Run) == []
    assert of(bench.do(bench.pool.worker_reached("w", Capacity(max_running=2, max_queued=0, kv_tokens=99), bench.now)),
              ListRuns)  # fmt: skip
    effects = bench.do(bench.pool.listed("w", [Listed("r", Attempt(0, 5))], bench.now))
    [run] = of(effects, Run)
    assert isinstance(run, Run)
    assert (run.worker, run.attempt.epoch) == ("w", bench.pool.epoch)


def test_it_does_not_wait_for_a_silent_worker_longer_than_a_lease() -> None:
    bench = Bench(active=False)
    bench.pool.take_over(0, 0)
    bench.pool.expect_worker("silent")
    bench.do(bench.pool.claim(bench.now))
    bench.land()
    bench.worker()
    assert of(bench.task(), Run) == []
    assert of(bench.pass_ms(120, alive=("w",)), Run)


def test_a_run_whose_task_is_read_later_is_attached_to() -> None:
    bench = Bench()
    bench.worker("w", [Listed("r", Attempt(0, 5))])
    bench.worker("idle")
    [run] = of(bench.task(), Run)
    assert isinstance(run, Run)
    assert run.worker == "w"


def test_a_broken_call_is_made_again_under_a_new_attempt() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    first = bench.last_run().attempt
    bench.do(bench.pool.broken("w", "r", first, bench.now))
    [again] = of(bench.pass_ms(20, alive=("w",)), Run)
    assert isinstance(again, Run)
    assert (again.worker, again.attempt > first) == ("w", True)


def test_runs_that_are_elsewhere_by_now_are_ended() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    bench.do(bench.pool.worker_reached("late", Capacity(max_running=1, max_queued=0, kv_tokens=99), bench.now))
    effects = bench.do(bench.pool.listed("late", [Listed("r", Attempt(0, 0))], bench.now))
    assert of(effects, CancelRun) == [CancelRun("late", "r", Attempt(0, 0))]


def test_a_run_the_worker_does_not_know_is_called_again_without_a_loss() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    bench.do(bench.pool.worker_reached("w", Capacity(max_running=2, max_queued=0, kv_tokens=99), bench.now))
    assert of(bench.do(bench.pool.listed("w", [], bench.now)), Run)
    assert not bench.pool.entries["r"].losses


# 4: commits


def test_commits_wait_for_the_first_that_is_unfinished() -> None:
    bench = Bench()
    bench.worker()
    bench.task("a")
    bench.task("b")
    bench.do(bench.pool.result("w", "b", bench.last_run("b").attempt, DONE, bench.now))
    bench.land()
    assert bench.pool.tracker.position == 0
    bench.do(bench.pool.result("w", "a", bench.last_run("a").attempt, DONE, bench.now))
    bench.land()
    assert bench.pool.tracker.position == 2


def test_a_restart_does_not_run_what_has_an_outcome() -> None:
    bench = Bench()
    bench.worker()
    bench.task("a")
    bench.do(bench.pool.result("w", "a", bench.last_run("a").attempt, DONE, bench.now))
    bench.land()
    after = Bench(active=False)
    after.pool.take_over(0, 0)
    for record in bench.journal:
        after.read(record)
    after.do(after.pool.claim(after.now))
    after.land()
    after.worker()
    assert of(after.task("a"), Run) == []
    assert after.pool.tracker.position == 1


def test_reading_ahead_is_bounded() -> None:
    bench = Bench(PoolConfig(read_ahead=2, lease_ms=100, retry_ms=50))
    bench.task("a")
    assert bench.pool.wants_tasks
    bench.task("b")
    assert not bench.pool.wants_tasks


# 5: losses


def lose(bench: Bench, worker: str) -> None:
    bench.do(bench.pool.worker_gone(worker, bench.now))


def test_a_loss_is_in_the_journal_before_the_next_attempt() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    first = bench.last_run().attempt
    bench.worker("other")
    lose(bench, "w")
    assert bench.last_run().attempt == first, "nothing was started yet"
    [lost] = [record for record in bench.pending if isinstance(record, Lost)]
    assert lost.attempts == (("r", first),)
    bench.land()
    assert bench.last_run().worker == "other"
    assert bench.last_run().attempt > first


def test_a_worker_that_is_silent_for_a_lease_is_lost() -> None:
    bench = Bench()
    bench.worker()
    bench.task()
    assert of(bench.pass_ms(80), Disconnect) == []
    assert of(bench.pass_ms(40), Disconnect) == [Disconnect("w")]


def test_after_three_losses_it_is_buried_and_then_fails() -> None:
    bench = Bench()
    bench.task()
    for name in ("w1", "w2", "w3"):
        bench.worker(name)
        assert bench.last_run().worker == name
        lose(bench, name)
        bench.land()
    assert bench.outcomes() == []
    [bury] = of(bench.wanted, WriteDeadLetter)
    assert isinstance(bury, WriteDeadLetter)
    assert bench.pool.tracker.position == 0
    bench.do(bench.pool.dead_letter_written("r", bench.now))
    bench.land()
    assert bench.outcomes()[0].reason is FinishReason.FAILED
    assert bench.pool.tracker.position == 1


def test_losses_are_known_to_a_successor() -> None:
    bench = Bench(active=False)
    bench.pool.take_over(0, 0)
    bench.read(Claim(scheduler="before", read_to=0))
    for n in range(3):
        bench.read(Lost(epoch=0, worker=f"w{n}", attempts=(("r", Attempt(0, n)),)))
    bench.do(bench.pool.claim(bench.now))
    bench.land()
    bench.worker()
    assert of(bench.task(), WriteDeadLetter)


def test_one_loss_told_twice_is_one() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    lose(bench, "w")
    [lost] = [record for record in bench.pending if isinstance(record, Lost)]
    bench.land()
    bench.read(lost)
    assert len(bench.pool.entries["r"].losses) == 1


def test_a_suspect_runs_alone() -> None:
    bench = Bench()
    bench.worker("w1")
    bench.task("suspect")
    for name in ("w1", "w2"):
        lose(bench, name)
        bench.land()
        bench.worker({"w1": "w2", "w2": "w3"}[name])
    assert bench.last_run("suspect").worker == "w3"
    assert of(bench.task("innocent"), Run) == [], "nothing beside a suspect"
    bench.do(bench.pool.result("w3", "suspect", bench.last_run("suspect").attempt, DONE, bench.now))
    bench.land()
    assert bench.last_run("innocent").worker == "w3"


def test_a_suspect_waits_until_a_worker_is_empty_and_gets_it() -> None:
    bench = Bench()
    bench.worker("w1", max_running=1)
    bench.task("suspect")
    lose(bench, "w1")
    bench.land()
    bench.worker("w2", max_running=1)
    lose(bench, "w2")
    bench.task("innocent")
    bench.worker("w3")
    assert bench.last_run("innocent").worker == "w3"
    bench.land()
    bench.task("another")
    assert bench.pool.entries["another"].worker is None, "the only worker empties for the suspect"
    bench.do(bench.pool.result("w3", "innocent", bench.last_run("innocent").attempt, DONE, bench.now))
    bench.land()
    assert bench.last_run("suspect").worker == "w3"


def test_a_refusal_is_no_attempt_and_the_worker_is_left_alone_for_a_while() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    bench.do(bench.pool.refused("w", "r", bench.last_run().attempt, bench.now, back_off_ms=30))
    runs = len(of(bench.wanted, Run))
    assert not bench.pool.entries["r"].losses
    bench.pass_ms(20, alive=("w",))
    assert len(of(bench.wanted, Run)) == runs
    bench.pass_ms(20, alive=("w",))
    assert len(of(bench.wanted, Run)) == runs + 1


def test_what_is_given_back_goes_on_elsewhere_without_a_loss() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    bench.worker("other")
    bench.do(bench.pool.given_back("w", "r", bench.last_run().attempt, bench.now))
    assert bench.last_run().worker == "other"
    assert not bench.pool.entries["r"].losses


# 7: no gateway is there


def test_what_came_without_a_key_through_a_gateway_that_has_gone_is_ended() -> None:
    bench = Bench()
    bench.worker(max_running=2)
    bench.task("runs", reply_to="g")
    bench.task("keyed", reply_to="g", keyed=True)
    bench.task("waits", reply_to="g")
    bench.task("another's", reply_to="other")
    run = bench.last_run("runs")
    assert bench.pool.gateways == {"g", "other"}
    effects = bench.do(bench.pool.gateway_gone("g", bench.now))
    assert of(effects, CancelRun) == [CancelRun("w", "runs", run.attempt)]
    bench.land()
    assert {(outcome.request_id, outcome.reason) for outcome in bench.outcomes()} == {
        ("runs", FinishReason.CANCELLED), ("waits", FinishReason.CANCELLED),
    }  # fmt: skip
    assert bench.pool.gateways == {"other"}
    assert bench.pool.entries["keyed"].stage.value == "placed"


def test_a_gateway_s_end_is_of_no_interest_while_the_pool_is_not_held() -> None:
    bench = Bench(active=False)
    assert bench.pool.gateways == frozenset()


# 3: what is listed and of no use


def test_a_run_listed_under_a_request_that_ends_without_it_is_ended_at_once() -> None:
    bench = Bench()
    bench.task()
    bench.record(Cancel(request_id="r", pool=0, deadline_ms=1))
    run = Listed("r", Attempt(0, 7))
    bench.worker("w", [run])
    assert of(bench.wanted, CancelRun) == [CancelRun("w", "r", run.attempt)]


def test_the_run_whose_result_is_being_written_is_kept_until_that_counts() -> None:
    bench = Bench()
    bench.worker("w")
    bench.task()
    attempt = bench.last_run().attempt
    bench.do(bench.pool.result("w", "r", attempt, DONE, bench.now))
    bench.worker("w", [Listed("r", attempt, finished=True)])
    bench.worker("other", [Listed("r", Attempt(0, 0))])
    assert of(bench.wanted, CancelRun) == [CancelRun("other", "r", Attempt(0, 0))]
    bench.land()
    assert of(bench.wanted, Release) == [Release("w", "r", attempt)]


def test_runs_listed_before_their_request_is_known_end_with_it() -> None:
    """A cancel comes instead of the task; and of two workers that have the same run, only one goes on."""
    bench = Bench()
    bench.worker("a", [Listed("gone", Attempt(0, 1)), Listed("here", Attempt(0, 2))])
    bench.worker("b", [Listed("gone", Attempt(0, 3)), Listed("here", Attempt(0, 4))])
    bench.record(Cancel(request_id="gone", pool=0, deadline_ms=1))
    bench.land()
    assert of(bench.wanted, Release) == [Release("a", "gone", Attempt(0, 1)), Release("b", "gone", Attempt(0, 3))]
    bench.wanted.clear()
    bench.task("here")
    assert [run.worker for run in of(bench.wanted, Run)] == ["a"]  # type: ignore[union-attr]
    assert of(bench.wanted, Release) == [Release("b", "here", Attempt(0, 4))]


# 8, 9: cancels, expiry, shedding


def test_a_cancel_ends_what_waits_and_what_runs() -> None:
    bench = Bench()
    bench.task("waits")
    bench.record(Cancel(request_id="waits", pool=0, deadline_ms=1))
    bench.worker()
    bench.task("runs")
    effects = bench.record(Cancel(request_id="runs", pool=0, deadline_ms=1))
    assert of(effects, CancelRun)
    bench.land()
    assert [outcome.reason for outcome in bench.outcomes()] == [FinishReason.CANCELLED] * 2
    assert bench.pool.tracker.position == 4


def test_a_cancel_before_its_request_is_honoured_across_a_restart() -> None:
    bench = Bench()
    bench.worker()
    bench.record(Cancel(request_id="r", pool=0, deadline_ms=1))
    bench.land()
    assert bench.pool.tracker.position == 1, "it holds nothing up"
    after = Bench(active=False)
    after.pool.take_over(0, 0)
    for record in bench.journal:
        after.read(record)
    after.do(after.pool.claim(after.now))
    after.land()
    after.worker()
    assert of(after.task(), Run) == []


def test_what_passes_its_deadline_expires_waiting_or_running() -> None:
    bench = Bench()
    bench.task("waits", deadline_ms=50)
    bench.worker()
    bench.do(bench.pool.tick(bench.now))
    bench.task("runs", deadline_ms=50)
    effects = bench.pass_ms(100, alive=("w",))
    assert of(effects, CancelRun)
    bench.land()
    assert {outcome.reason for outcome in bench.outcomes()} == {FinishReason.EXPIRED}


def test_beyond_the_bound_and_after_too_long_a_wait_requests_are_shed_with_the_reason() -> None:
    bench = Bench()
    for number in range(5):
        bench.task(f"r{number}")
    bench.land()
    [shed] = bench.outcomes()
    assert (shed.request_id, shed.reason) == ("r4", FinishReason.SHED)
    assert "4 requests wait" in shed.message
    bench.pass_ms(5_100)
    bench.land()
    assert len({outcome.request_id for outcome in bench.outcomes()}) == 5
    assert "waited" in bench.outcomes()[-1].message


def test_a_request_too_large_for_every_worker_is_shed() -> None:
    bench = Bench()
    bench.worker()
    bench.task(tokens=2_000)
    bench.land()
    assert "KV" in bench.outcomes()[0].message


# 10, 11: copies and what can not be read


def test_a_copy_ends_with_the_first() -> None:
    bench = Bench()
    bench.worker()
    bench.task("r")
    assert of(bench.task("r"), Run) == []
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    bench.land()
    assert len(bench.outcomes()) == 1
    assert bench.pool.tracker.position == 2
    assert of(bench.task("r"), Run) == []
    assert bench.pool.tracker.position == 3


def test_an_unreadable_request_whose_id_is_known_has_an_outcome() -> None:
    bench = Bench()
    bench.record(Rejected(request_id="r", pool=0, reason="no prompt"))
    bench.land()
    assert (bench.outcomes()[0].reason, bench.outcomes()[0].message) == (FinishReason.FAILED, "no prompt")


def test_a_broken_copy_of_a_known_request_does_not_end_it() -> None:
    bench = Bench()
    bench.worker()
    bench.task("r")
    assert bench.record(Rejected(request_id="r", pool=0, reason="no prompt")) == []
    assert bench.pool.entries["r"].stage.value == "placed"


def test_depth_says_how_many_wait_and_how_long() -> None:
    bench = Bench()
    bench.task("a")
    bench.pass_ms(100)
    assert bench.pool.depth.waiting == 1
    assert bench.pool.depth.wait_ms == pytest.approx(100, abs=1)
    assert bench.pool.depth.limit == 4
