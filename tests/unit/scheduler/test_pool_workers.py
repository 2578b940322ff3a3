"""A worker as policies are shown it: what it said, and what it will have done since."""

from __future__ import annotations

from greenroom.policies.placement.placement_policy import Costs, PendingRequest
from greenroom.scheduler.pool_workers import Capacity, PoolWorker, WorkerState
from greenroom.scheduler.request_entries import Entry, RequestStage

COSTS = Costs(token_ms=5.0, prefill_token_ms=1.0)


def entry(name: str, *, tokens: int = 50, limit: int = 100, placed: float = 0.0, inputs: int = 10) -> Entry:
    pending = PendingRequest(name, 0.0, inputs, inputs + limit - 1, tokens, deadline_ms=1e9)
    return Entry(name, 0, pending=pending, stage=RequestStage.PLACED, placed_ms=placed)


def pool_worker(
    *entries: Entry, said: dict[str, int] | None = None, heard: float = 0.0, costs: Costs = COSTS
) -> PoolWorker:
    made = PoolWorker("w", Capacity(max_running=8, max_queued=0, kv_tokens=1000), 1e9, costs=costs, heard_ms=heard)
    made.placed = {one.request_id: one for one in entries}
    made.state = WorkerState(generated=said or {})
    return made


def generated(made: PoolWorker, now: float) -> list[tuple[int, int]]:
    return [(placed.generated_tokens, placed.expected_left) for placed in made.view(now).running]


def test_what_it_said_and_a_token_for_each_step_since() -> None:
    there = pool_worker(entry("a"), entry("b"), said={"a": 4, "b": 20}, heard=1000.0)
    assert generated(there, 1000.0) == [(4, 46), (20, 30)]
    assert generated(there, 1035.0) == [(7, 43), (23, 27)], "a step of two rows takes 10 ms"


def test_prompts_that_were_not_read_come_before_that() -> None:
    there = pool_worker(entry("a"), entry("new", placed=1000.0, inputs=30), said={"a": 4}, heard=900.0)
    assert generated(there, 1000.0) == [(11, 39), (0, 50)]
    assert generated(there, 1051.0) == [(16, 34), (2, 48)]


def test_without_known_costs_it_is_what_was_said() -> None:
    assert generated(pool_worker(entry("a"), said={"a": 4}, costs=Costs()), 1e6) == [(4, 46)]


def test_one_that_goes_on_beyond_what_was_expected_has_five_percent_left_again() -> None:
    assert generated(pool_worker(entry("a"), said={"a": 50}), 0.0) == [(50, 3)]


def test_a_worker_that_lies_about_tokens_is_believed_up_to_the_requests_limit() -> None:
    there = pool_worker(entry("a", limit=60), said={"a": 10**12})
    assert generated(there, 0.0) == [(59, 1)]
    assert generated(pool_worker(entry("one", limit=1), said={"one": 7}), 0.0) == [(0, 1)]


def growing(name: str, *, first: int, most: int, inputs: int = 10) -> Entry:
    pending = PendingRequest(name, 0.0, inputs, inputs + first - 1, first, deadline_ms=1e9, most_tokens=most)
    return Entry(name, 0, pending=pending, stage=RequestStage.PLACED)


def test_memory_counts_by_what_is_expected_and_grows_with_an_answer_that_is_longer() -> None:
    one = growing("a", first=40, most=500)
    assert pool_worker(one, costs=Costs()).view(0.0).kv_free == 1000 - 49
    assert pool_worker(one, said={"a": 39}, costs=Costs()).view(0.0).kv_free == 1000 - 49
    assert pool_worker(one, said={"a": 40}, costs=Costs()).view(0.0).kv_free == 1000 - (10 + 61 - 1)
    assert pool_worker(one, said={"a": 10**9}, costs=Costs()).view(0.0).kv_free == 1000 - (10 + 500 - 1)


def test_one_that_only_scores_its_prompt_has_generated_nothing() -> None:
    """It has not minus one token, as if its prompt had been read."""
    there = pool_worker(growing("a", first=0, most=0), costs=Costs())
    [placed] = there.view(0.0).running
    assert placed.generated_tokens == 0
    assert there.view(0.0).kv_free == 1000 - 10


def test_tokens_are_believed_up_to_what_may_be_generated_not_to_what_is_expected() -> None:
    there = pool_worker(growing("a", first=40, most=100), said={"a": 70}, costs=Costs())
    assert generated(there, 0.0) == [(70, 2)]
