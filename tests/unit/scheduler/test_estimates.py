"""What is expected of requests and workers: the profile's figures, else what was seen."""

from __future__ import annotations

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from greenroom.policies.base.answer_lengths import ENOUGH, MEMORY, MOST_TASKS
from greenroom.policies.placement.placement_policy import Costs
from greenroom.scheduler.estimates import Estimates, experts_wanted
from tests.unit.policies.model_profiles import model_profile, task_profile

EVEN = [[1, 1], [1, 1]]
PROFILE = model_profile(
    {"code": task_profile(EVEN, writes=40), "chat": task_profile(EVEN, writes=100)}, load_ms={1: 10.0, 4: 28.0}
)


def learn(estimates: Estimates, task: str, *tokens: int) -> None:
    for count in tokens:
        estimates.finished(task, count)


def test_without_anything_it_is_the_limit() -> None:
    assert Estimates().tokens("code", 512) == 512


def test_without_anything_memory_is_not_kept_for_the_whole_context() -> None:
    assert Estimates().held_tokens("code", 24, 1000) == 64
    assert Estimates().held_tokens("code", 24, 8) == 8
    learnt = Estimates(PROFILE)
    assert learnt.held_tokens("code", 24, 1000) == learnt.tokens("code", 1000) == 40


def test_the_profile_comes_before_what_is_seen() -> None:
    estimates = Estimates(PROFILE)
    learn(estimates, "code", *[7] * ENOUGH)
    assert estimates.tokens("code", 512) == 40
    assert estimates.tokens("code", 12) == 12
    assert estimates.tokens("never heard of", 512) == 70, "the mean of all that were profiled"


def test_a_type_that_the_profile_does_not_name_has_what_was_seen_of_it() -> None:
    estimates = Estimates(PROFILE)
    learn(estimates, "poems", *[7] * ENOUGH)
    assert estimates.tokens("poems", 512) == 7


def test_means_are_learnt_by_type_and_of_all_until_there_are_enough() -> None:
    estimates = Estimates()
    learn(estimates, "code", *[10] * (ENOUGH - 1))
    assert estimates.tokens("code", 512) == 512
    learn(estimates, "chat", *[50] * ENOUGH)
    assert estimates.tokens("chat", 512) == 50
    assert estimates.tokens("code", 512) == estimates.tokens("new", 512) == round((7 * 10 + 8 * 50) / 15)
    learn(estimates, "code", 10)
    assert estimates.tokens("code", 512) == 10


def test_a_mean_follows_a_change() -> None:
    estimates = Estimates()
    learn(estimates, "code", *[10] * 5000)
    learn(estimates, "code", *[100] * 4 * MEMORY)
    assert estimates.tokens("code", 512) >= 98


def test_what_is_kept_by_type_is_bounded() -> None:
    estimates = Estimates()
    for number in range(MOST_TASKS + 50):
        learn(estimates, f"t{number}", *[5] * ENOUGH)
    learn(estimates, "one more", *[500] * ENOUGH)
    assert estimates.tokens("one more", 512) == estimates.tokens("never", 512)
    assert estimates.tokens("t0", 512) == 5


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4096)), max_size=60), st.integers(1, 4096))
def test_it_is_within_the_limit_and_the_same_for_the_same_history(seen: list[tuple[str, int]], limit: int) -> None:
    one, two = Estimates(), Estimates()
    for task, tokens in seen:
        one.finished(task, tokens)
        two.finished(task, tokens)
    for task in "abcd":
        assert 1 <= one.tokens(task, limit) <= limit
        assert one.tokens(task, limit) == two.tokens(task, limit)


def test_what_a_worker_says_is_taken_where_there_is_no_profile() -> None:
    heard = Costs(token_ms=3.0, load_ms_by_task={"code": 1.0})
    assert Estimates().costs(heard, missing=0.5, rows=4) is heard


def test_c_by_batch_size_and_loads_come_from_the_profile_and_what_a_worker_says_of_loads_goes_before() -> None:
    estimates = Estimates(PROFILE)
    costs = estimates.costs(Costs(token_ms=3.0, load_ms_by_task={"chat": 1.0}), missing=0.25, rows=4)
    assert costs.token_ms_by_rows == (1.0, 1.0, 1.0, 1.0)
    assert costs.prefill_token_ms == 0.1
    assert costs.load_ms_by_task["chat"] == 1.0
    assert costs.load_ms_by_task["code"] == pytest.approx(10.0, abs=0.1), "4 experts are wanted, a quarter is missing"
    nothing_missing = estimates.costs(Costs(), missing=0.0, rows=8)
    assert nothing_missing.load_ms_by_task == {"code": 0.0, "chat": 0.0}
    assert len(nothing_missing.token_ms_by_rows) == 8


def test_steps_by_rows_come_from_a_profile_that_has_them_and_an_older_one_has_a_cost_of_a_prompts_token() -> None:
    assert Estimates(PROFILE).costs(Costs(), missing=0.0, rows=4).steps is None
    assert PROFILE.costs is not None
    measured = structs.replace(
        PROFILE.costs, token_ms_by_rows={1: 10.0, 3: 8.0}, prompt_step_ms={1: 10.0, 8: 24.0, 16: 32.0}
    )
    costs = Estimates(structs.replace(PROFILE, costs=measured)).costs(Costs(), missing=0.0, rows=4)
    assert costs.token_ms_by_rows == (10.0, 8.5, 8.0, 8.0), "on the line of whole steps: 10, 17, 24"
    assert costs.read_all_ms(8, rows=1, generating=0) == 24.0
    assert costs.read_all_ms(13, rows=4, generating=3) == 32.0 - 24.0, "what it adds to the step of three"
    assert costs.read_all_ms(32, rows=1, generating=0) == 2 * 32.0, "two steps"
    assert costs.read_all_ms(0, rows=4, generating=3) == 0.0


def test_a_profile_of_another_model_is_given_up_and_said_so_once(caplog: pytest.LogCaptureFixture) -> None:
    estimates = Estimates(PROFILE)
    heard = Costs(token_ms=3.0)
    for _ in range(3):
        estimates.meet("other", 96)
    assert estimates.costs(heard, missing=0.5, rows=4) is heard
    assert estimates.tokens("code", 512) == 512, "as without a profile"
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "other with 96" in said
    assert "greenroom profile" in said


@pytest.mark.parametrize("experts", [0, 3, 4])
def test_a_profile_that_may_be_of_the_workers_model_is_used_under_any_name(experts: int) -> None:
    """Names are the operator's to give; a layer may have fewer experts than the largest; 0 says nothing."""
    estimates = Estimates(model_profile({"code": task_profile([[1, 1], [1, 0]], writes=40)}))
    estimates.meet("a name of our own", experts)
    assert estimates.tokens("code", 512) == 40


@pytest.mark.parametrize("experts", [2, 5])
def test_too_few_or_too_many_experts_for_the_profile(experts: int) -> None:
    estimates = Estimates(model_profile({"code": task_profile([[1, 1], [1, 0]], writes=40)}))
    estimates.meet("m", experts)
    assert estimates.tokens("code", 512) == 512


def test_experts_wanted_are_those_that_at_least_one_token_picks() -> None:
    one_token = model_profile({"t": task_profile([[3, 1]], reads=1)})
    assert experts_wanted(one_token, "t") == pytest.approx(1.0)
    two = model_profile({"t": task_profile([[3, 1]], reads=2)})
    assert experts_wanted(two, "t") == pytest.approx((1 - 0.25**2) + (1 - 0.75**2))
    assert math.isclose(experts_wanted(model_profile({"t": task_profile([[1, 0]], reads=0)}, top_k=2), "t"), 1.0)
