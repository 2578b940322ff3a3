"""Which experts stay and which are fetched, by what is forecast for the present tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.events import (
    LayerRouting,
    Prediction,
    PredictionRequest,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    VictimRequest,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.emoe.popularity import POPULARITY, Popularity
from tests.unit.policies.bench import keys_of, mask_of

CATALOGUE = Catalogue.uniform("pool", layers=2, experts=4, top_k=1, expert_bytes=10)
SORTS = [0.7, 0.1, 0.1, 0.1, 0.1, 0.7, 0.1, 0.1]
CHATS = [0.1, 0.1, 0.1, 0.7, 0.1, 0.1, 0.1, 0.7]


def policy(**options: Any) -> Popularity:
    made = Popularity(CATALOGUE, **options)
    made.on_budget_changed(Tier.DEVICE, 40)
    return made


def forecast(of: Popularity, task: str | None, values: list[float], *, kind: str = POPULARITY) -> None:
    of.on_prediction(Prediction(PredictionRequest(kind, (0, 2), task=task), "1", np.array(values, dtype=np.float32)))


def step(of: Popularity) -> None:
    of.on_step_started(Step("pool", 1, keys_of([]), np.empty(0, dtype=np.uint8)))


def victims(of: Popularity, count: int = 1) -> list[int]:
    every = mask_of(CATALOGUE, set(range(8)))
    return [int(key) for key in of.victims(VictimRequest(Tier.DEVICE, 10 * count, every, every))]


def wanted(of: Popularity) -> list[int]:
    return [] if of.target is None else np.flatnonzero(of.target.wanted).tolist()


def use(of: Popularity, *experts: int) -> None:
    where = Step("pool", 1, keys_of([0]), np.ones(1, dtype=np.uint8))
    of.on_layer_routed(LayerRouting(CATALOGUE, where, 0, keys_of(list(experts)), keys_of([1] * len(experts))))


def test_without_a_forecast_it_is_its_retention() -> None:
    made = policy(retention="lru")
    use(made, 2)
    use(made, 0)
    assert victims(made, 7) == [1, 3, 4, 5, 6, 7, 2]
    assert made.target is None


def test_the_popular_ones_are_wanted_and_stay() -> None:
    made = policy()
    made.on_sequence_queued(SequenceInfo(1, "sort", 10, 10))
    forecast(made, "sort", SORTS)
    assert {0, 5} <= set(wanted(made))
    assert len(wanted(made)) == 3, "three quarters of four slots"
    assert set(victims(made, 6)) == {1, 2, 3, 4, 6, 7}


def test_among_equals_the_retention_decides() -> None:
    made = policy(retention="lru")
    forecast(made, "sort", SORTS)
    use(made, 1)
    use(made, 2)
    assert victims(made, 6) == [3, 4, 6, 7, 1, 2]


def test_tasks_count_by_their_tokens_while_they_are_here() -> None:
    made = policy(share=0.5)
    forecast(made, "sort", SORTS)
    forecast(made, "chat", CHATS)
    made.on_sequence_queued(SequenceInfo(1, "sort", 10, 10))
    made.on_sequence_queued(SequenceInfo(2, "chat", 200, 100))
    step(made)
    assert wanted(made) == [3, 7]
    made.on_sequence_ended(2, SequenceEnd.FINISHED)
    step(made)
    assert wanted(made) == [0, 5]
    generation = made.target.generation if made.target else -1
    step(made)
    assert made.target is not None
    assert made.target.generation == generation, "nothing has changed"


def test_a_target_is_not_thrown_over_for_a_little() -> None:
    made = policy(share=0.25)
    forecast(made, "sort", [0.5, 0.4, 0, 0, 0, 0, 0, 0])
    before = made.target
    forecast(made, "sort", [0.4, 0.5, 0, 0, 0, 0, 0, 0])
    assert made.target is before
    forecast(made, "sort", [0.1, 0.8, 0, 0, 0, 0, 0, 0])
    assert wanted(made) == [1]


def test_tasks_that_nothing_is_known_of_leave_the_others_to_decide() -> None:
    made = policy(share=0.5)
    forecast(made, "sort", SORTS)
    made.on_sequence_queued(SequenceInfo(1, "unheard-of", 10, 10))
    step(made)
    assert wanted(made) == [0, 5]


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="share"):
        Popularity(CATALOGUE, share=1.5)
    with pytest.raises(UnknownName, match="retention"):
        Popularity(CATALOGUE, retention="luck")
