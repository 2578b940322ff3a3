from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.emoe.scheduling.jobs import Job
from benchmarks.emoe.scheduling.schedulers import ARMS, estimates
from benchmarks.emoe.scheduling.simulator import Machine, Served, Simulation, simulate
from benchmarks.emoe.scheduling.step_costs import ServingOverhead
from greenroom.core.model_profile import MeasuredCosts
from greenroom.policies.placement.fcfs import FcfsPlacement
from tests.examples import examples
from tests.unit.benchmarks.emoe.profiles import COSTS, profile

MACHINE = Machine(profile=profile(), max_running=4, max_queued=2, kv_tokens=64, beat_ms=0.0, tick_ms=50.0)


def job(number: int, at_ms: float = 0.0, tokens_in: int = 3, tokens_out: int = 2, **more: Any) -> Job:
    return Job(f"r{number}", "short", at_ms, tokens_in, tokens_out, max_tokens=8, label="short", **more)


def fcfs(jobs: list[Job], machine: Machine = MACHINE) -> list[Served]:
    return simulate(jobs, FcfsPlacement(), machine)


def test_steps_take_what_their_rows_were_measured_to_take_whatever_the_scheduler_goes_by() -> None:
    really = MeasuredCosts(token_ms_by_rows={1: 1.0, 4: 1.0}, prefill_token_ms=1.0, prompt_step_ms={3: 7.0, 6: 12.0})
    (one,) = fcfs([job(0, tokens_in=3, tokens_out=3)], replace(MACHINE, really=really))
    assert one.first_ms == 7.0
    assert one.end_ms == 7.0 + 1.0 + 1.0
    first, second = fcfs([job(0, tokens_out=3), job(1, at_ms=5.0)], replace(MACHINE, really=really))
    # one that decodes beside 3 of a prompt is a step of 4 rows of prompts
    assert second.first_ms == pytest.approx(7.0 + 7.0 + 5.0 / 3)
    assert first.end_ms == second.end_ms == pytest.approx(7.0 + 7.0 + 5.0 / 3 + 2.0)


def test_the_scheduler_goes_by_the_profile_and_not_by_what_steps_really_take() -> None:
    """Placed while the other runs, it would miss its SLO by the profile's times, though not by the real ones."""
    fast = MeasuredCosts(token_ms_by_rows={1: 0.001}, prefill_token_ms=0.001)
    jobs = [job(0, tokens_out=8, slo_e2e_ms=120.0), job(1, tokens_out=8, slo_e2e_ms=60.0)]
    machine = replace(MACHINE, kv_tokens=64)
    slow = [one.placed_ms for one in simulate(jobs, ARMS["emoe"].create(), machine)]
    misled = [one.placed_ms for one in simulate(jobs, ARMS["emoe"].create(), replace(machine, really=fast))]
    assert slow[0] == misled[0] == 0.0
    told = replace(machine, profile=profile(costs=fast))
    assert [one.placed_ms for one in simulate(jobs, ARMS["emoe"].create(), told)] == [0.0, 0.0]
    assert misled[1] != 0.0


def test_a_request_alone_reads_its_prompt_in_one_step_and_then_decodes() -> None:
    (one,) = fcfs([job(0, at_ms=100.0, tokens_in=3, tokens_out=3)])
    assert one.placed_ms == 100.0
    assert one.first_ms == 100.0 + 20.0
    assert one.end_ms == 100.0 + 20.0 + 10.0 + 10.0


def test_a_prompt_longer_than_a_chunk_is_read_in_several_steps() -> None:
    (one,) = fcfs([job(0, tokens_in=6, tokens_out=1)], replace(MACHINE, prefill_chunk=4))
    assert one.first_ms == one.end_ms == 24.0 + 16.0


def test_what_a_server_takes_beside_its_engine_is_added_to_each_step_and_to_each_request() -> None:
    beside = ServingOverhead(request_ms=5.0, step_ms=2.0, row_ms=0.5)
    (one,) = fcfs([job(0, tokens_in=3, tokens_out=3)], replace(MACHINE, overhead=beside))
    assert one.first_ms == 20.0 + 2.5
    assert one.end_ms == 20.0 + 10.0 + 10.0 + 3 * 2.5 + 5.0
    first, second = fcfs([job(0, tokens_out=3), job(1, at_ms=5.0)], replace(MACHINE, overhead=beside))
    # 3 rows alone; then one that decodes beside 3 of a prompt; then two that decode: two sequences in each of these
    assert (first.first_ms, second.first_ms) == (20.0 + 2.5, 20.0 + 2.5 + 24.0 + 3.0)
    assert first.end_ms == second.end_ms == 20.0 + 2.5 + 24.0 + 3.0 + 16.0 + 3.0 + 5.0


def test_requests_that_come_during_a_step_join_the_next_beside_decoding_ones() -> None:
    first, second = fcfs([job(0, tokens_in=3, tokens_out=3), job(1, at_ms=5.0, tokens_in=3, tokens_out=2)])
    # 3 rows; then one that decodes beside 3 of a prompt; then two that decode, and both are done
    assert (first.first_ms, second.first_ms) == (20.0, 20.0 + 24.0)
    assert first.end_ms == second.end_ms == 20.0 + 24.0 + 16.0


def test_what_has_no_room_waits_in_order_until_a_request_has_ended() -> None:
    crowded = replace(MACHINE, max_running=1, max_queued=0)
    served = fcfs([job(number, at_ms=float(number)) for number in range(3)], crowded)
    ends = [one.end_ms for one in served]
    assert ends == [30.0, 60.0, 90.0]
    assert [one.placed_ms for one in served] == [0.0, 30.0, 60.0]


def test_kv_that_is_reserved_keeps_others_out_and_kv_on_demand_does_not() -> None:
    """Each would need 10 of 16 tokens if it generated all that it may; it generates two."""
    jobs = [job(0), job(1)]
    reserved = fcfs(jobs, replace(MACHINE, kv_tokens=16, max_queued=0))
    assert [one.placed_ms for one in reserved] == [0.0, 30.0]
    on_demand = fcfs(jobs, replace(MACHINE, kv_tokens=32, max_queued=4, kv_on_demand=True))
    assert [one.end_ms for one in on_demand] == [20.0 + 24.0, 20.0 + 24.0 + 10.0]


def test_where_blocks_run_out_the_latest_begins_again_and_all_end() -> None:
    machine = replace(MACHINE, kv_tokens=48, max_queued=8, kv_on_demand=True)
    jobs = [Job(f"r{number}", "short", 0.0, 14, 20, max_tokens=20, label="short") for number in range(3)]
    run = Simulation(jobs, FcfsPlacement(), machine, lambda _: 20.0)
    served = run.run()
    assert run.workers["worker0"].preempted > 0
    assert all(one.end_ms is not None for one in served)
    assert served[0].end_ms == min(one.end_ms or 0.0 for one in served)
    with pytest.raises(ValueError, match="can never run"):
        simulate([job(0, tokens_in=60)], FcfsPlacement(), machine)


def test_experts_of_another_task_are_brought_before_the_next_step() -> None:
    """Half the experts fit: what ``short`` is routed to leaves when ``long``, sensitive at layer 1 alone, comes."""
    machine = replace(MACHINE, share=0.5)
    run = Simulation([job(0)], FcfsPlacement(), machine, lambda one: 2.0)
    worker = run.workers["worker0"]
    (served,) = run.run()
    brought = worker.loaded
    assert brought > 0
    assert served.end_ms == 30.0 + 7.0 * brought
    resident = fcfs([job(0)])
    assert resident[0].end_ms == 30.0


def test_the_scheduler_with_hindsight_is_told_the_true_length_and_others_their_labels_mean() -> None:
    told: dict[bool, int] = {}

    class Listens(FcfsPlacement):
        def __init__(self, hindsight: bool) -> None:
            self.hindsight = hindsight

        def decide(self, state: Any, now_ms: float) -> Any:
            told[self.hindsight] = state.pending[0].expected_tokens
            return super().decide(state, now_ms)

    for hindsight in (True, False):
        simulate([job(0, tokens_out=5)], Listens(hindsight), replace(MACHINE, hindsight=hindsight))
    assert told == {True: 5, False: 2}


def test_what_waits_too_long_or_finds_the_queue_full_is_given_up_and_counts_as_late() -> None:
    hurried = replace(MACHINE, max_running=1, max_queued=0, max_queue_wait_ms=40.0, tick_ms=5.0, max_waiting=2)
    served = fcfs([job(0), job(1), job(2), job(3)], hurried)
    assert [one.reason for one in served] == ["", "", "waited too long", "queue full"]
    assert [one.in_time for one in served] == [True, True, False, False]


def test_a_profile_without_costs_is_refused() -> None:
    with pytest.raises(ValueError, match="greenroom profile"):
        fcfs([job(0)], Machine(profile=profile(costs=None)))


JOBS = st.lists(
    st.tuples(st.floats(0, 400), st.integers(1, 12), st.integers(1, 8), st.sampled_from((None, 30.0, 90.0, 400.0))),
    min_size=1,
    max_size=24,
)


@settings(max_examples=examples(40))
@given(drawn=JOBS, arm=st.sampled_from(sorted(ARMS)), workers=st.integers(1, 2), share=st.sampled_from((0.5, 1.0)))
def test_every_request_has_one_end_after_the_time_that_it_needs_alone(
    drawn: list[tuple[float, int, int, float | None]], arm: str, workers: int, share: float
) -> None:
    jobs = [
        job(number, at_ms, tokens_in, tokens_out, slo_e2e_ms=slo)
        for number, (at_ms, tokens_in, tokens_out, slo) in enumerate(sorted(drawn, key=lambda one: one[0]))
    ]
    machine = replace(MACHINE, workers=workers, share=share, beat_ms=30.0)
    chosen = ARMS[arm]
    run = Simulation(jobs, chosen.create(), chosen.machine(machine), lambda _: 2.0, estimates)
    served = run.run()
    assert [one.job for one in served] == jobs
    steps = COSTS.steps()
    for one in served:
        assert one.end_ms is not None
        assert one.placed_ms is not None
        assert one.first_ms is not None
        alone = steps.step_ms(0, one.job.input_tokens) + (one.job.output_tokens - 1) * steps.step_ms(1)
        assert one.job.at_ms <= one.placed_ms <= one.first_ms <= one.end_ms
        assert one.end_ms - one.job.at_ms >= alone - 1e-6
    rows = sum(one.job.input_tokens + one.job.output_tokens - 1 for one in served)
    busy = sum(worker.busy_ms for worker in run.workers.values())
    assert busy >= rows * 5.0 - 1e-6  # no row costs less than one of a prompt


@settings(max_examples=examples(20))
@given(drawn=JOBS)
def test_equal_runs_are_equal(drawn: list[tuple[float, int, int, float | None]]) -> None:
    jobs = [
        job(number, at_ms, tokens_in, tokens_out, slo_e2e_ms=slo)
        for number, (at_ms, tokens_in, tokens_out, slo) in enumerate(drawn)
    ]
    first, second = (simulate(jobs, ARMS["emoe"].create(), MACHINE) for _ in range(2))
    assert first == second
