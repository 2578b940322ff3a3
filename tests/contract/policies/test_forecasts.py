"""One suite for the policies that work by forecasts of a task's popularity: what they take in, and what they keep."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from greenroom.policies.base.events import Prediction, PredictionRequest, SequenceInfo, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.policies.registry import create_policy
from tests.unit.policies.bench import keys_of

CATALOGUE = Catalogue.uniform("pool", layers=2, experts=4, top_k=1, expert_bytes=10)
SORTS = [0.7, 0.1, 0.1, 0.1, 0.1, 0.7, 0.1, 0.1]
CHATS = [0.1, 0.1, 0.1, 0.7, 0.1, 0.1, 0.1, 0.7]
POLICIES: dict[str, dict[str, Any]] = {"emoe": {}, "popularity": {"share": 1.0}}
every_policy = pytest.mark.parametrize("name", POLICIES)


def policy_of(name: str) -> ExpertPolicy:
    """With room for two experts, and a request of the task ``sort``."""
    policy = create_policy(name, catalogue=CATALOGUE, options=POLICIES[name])
    policy.on_budget_changed(Tier.DEVICE, 20)
    policy.on_sequence_queued(SequenceInfo(1, "sort", 10, 10))
    return policy


def forecast(of: ExpertPolicy, task: str | None, values: NDArray[np.float32], *, kind: str = POPULARITY) -> None:
    of.on_prediction(Prediction(PredictionRequest(kind, (0, 2), task=task), "1", values))


def wanted(of: ExpertPolicy) -> list[int] | None:
    """At the next step."""
    of.on_step_started(Step("pool", 1, keys_of([]), np.empty(0, dtype=np.uint8)))
    return None if of.target is None else np.flatnonzero(of.target.wanted).tolist()


def f32(values: list[float]) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


@every_policy
def test_the_most_popular_experts_of_the_present_task_are_wanted(name: str) -> None:
    """Guards the suite itself: a forecast does count."""
    policy = policy_of(name)
    assert wanted(policy) is None
    forecast(policy, "chat", f32(CHATS))
    forecast(policy, "sort", f32(SORTS))
    assert wanted(policy) == [0, 5]


@every_policy
@pytest.mark.parametrize(
    ("task", "values", "kind"), [("sort", CHATS, "router"), (None, CHATS, POPULARITY), ("sort", CHATS[:4], POPULARITY)]
)
def test_what_is_no_forecast_changes_nothing(name: str, task: str | None, values: list[float], kind: str) -> None:
    policy = policy_of(name)
    forecast(policy, task, f32(values), kind=kind)
    assert wanted(policy) is None
    forecast(policy, "sort", f32(SORTS))
    forecast(policy, task, f32(values), kind=kind)
    assert wanted(policy) == [0, 5]


@every_policy
def test_numbers_that_are_none_count_as_nothing(name: str) -> None:
    policy = policy_of(name)
    forecast(policy, "sort", f32([np.nan, np.inf, 0.5, 0, -1, 0, 0, 1]))
    assert wanted(policy) == [2, 7]


@every_policy
def test_forecasts_are_copied(name: str) -> None:
    policy = policy_of(name)
    values = f32(SORTS)
    forecast(policy, "sort", values)
    values[:] = CHATS
    assert wanted(policy) == [0, 5]
    policy.on_sequence_queued(SequenceInfo(2, "sort", 10, 10))
    assert wanted(policy) == [0, 5]


@every_policy
def test_the_oldest_tasks_forecasts_are_forgotten(name: str) -> None:
    policy = policy_of(name)
    forecast(policy, "sort", f32(SORTS))
    for number in range(200):
        forecast(policy, f"task{number}", f32(CHATS))
    policy.on_sequence_queued(SequenceInfo(2, "task199", 1, 1))
    assert wanted(policy) == [3, 7], "nothing is known of sort any more"
    copy.deepcopy(policy)


@every_policy
def test_a_task_that_is_forecast_again_is_not_the_oldest(name: str) -> None:
    policy = policy_of(name)
    for number in range(80):
        if number % 40 == 0:
            forecast(policy, "sort", f32(SORTS))
        forecast(policy, f"task{number}", f32(CHATS))
    assert wanted(policy) == [0, 5]
