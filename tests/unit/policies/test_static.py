"""A set of experts that never changes."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.events import Prediction, PredictionRequest, Reason, SequenceInfo, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.emoe.popularity import POPULARITY
from greenroom.policies.replacement.static import Static
from tests.unit.policies.bench import mask_of, step_of
from tests.unit.policies.model_profiles import model_profile, task_profile

CATALOGUE = Catalogue.uniform("pool", layers=3, experts=8, top_k=2, expert_bytes=10)
RANDOM = np.random.default_rng(3)
TABLES = [RANDOM.random((3, 8)), RANDOM.random((3, 8))]
PROFILE = model_profile({"a": task_profile(TABLES[0].tolist()), "b": task_profile(TABLES[1].tolist())})


def wanted(policy: Static, slots: int) -> set[int]:
    policy.on_budget_changed(Tier.DEVICE, 10 * slots)
    assert policy.target is not None
    return set(np.flatnonzero(policy.target.wanted).tolist())


def test_the_most_popular_of_all_tasks_alike() -> None:
    shares = np.mean([table / table.sum(axis=1, keepdims=True) for table in TABLES], axis=0)
    best = {int(key) + 8 * layer for layer in range(3) for key in np.argsort(-shares[layer])[:2]}
    for key in np.argsort(-shares.ravel()).tolist():
        if len(best) < 12:
            best.add(key)
    assert wanted(Static(CATALOGUE, profile=PROFILE, fidelity="paper"), 12) == best


def test_graded_it_is_those_that_answers_lose_most_without() -> None:
    losses = np.zeros((3, 8))
    losses[0, :5] = 1.0
    losses[1, 3] = losses[2, 6] = 0.5
    profile = model_profile({"a": task_profile(TABLES[0].tolist(), loss=losses.tolist())})
    graded = wanted(Static(CATALOGUE, profile=profile, fidelity="paper", sensitivity="graded"), 9)
    assert {0, 1, 2, 3, 4, 11, 22} < graded
    plain = wanted(Static(CATALOGUE, profile=profile, fidelity="paper"), 9)
    assert graded != plain == wanted(Static(CATALOGUE, profile=profile, fidelity="paper", sensitivity="binary"), 9)


def test_without_a_profile_the_first_of_every_layer() -> None:
    assert wanted(Static(CATALOGUE, fidelity="paper"), 9) == {0, 1, 2, 8, 9, 10, 16, 17, 18}


@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_a_share_of_all_is_drawn_by_the_seed_and_has_k_of_each_layer(share: float) -> None:
    drawn = [wanted(Static(CATALOGUE, share=share, seed=seed, fidelity="paper"), 24) for seed in range(40)]
    assert {len(one) for one in drawn} == {round(24 * share)}
    assert all(len(one & set(range(8 * layer, 8 * layer + 8))) >= 2 for one in drawn for layer in range(3))
    assert drawn[1] == wanted(Static(CATALOGUE, share=share, seed=1, fidelity="paper"), 24)
    if share < 1:
        assert len(set(map(frozenset, drawn))) > 30
        assert set.union(*drawn) == set(range(24))


def test_the_budget_bounds_it_and_misses_have_a_place_unless_there_are_none() -> None:
    assert len(wanted(Static(CATALOGUE, share=0.9, fidelity="paper"), 12)) == 12
    assert len(wanted(Static(CATALOGUE, share=0.9), 12)) == 10
    assert len(wanted(Static(CATALOGUE), 24)) == 24, "where all fit no look-up misses"
    assert len(wanted(Static(CATALOGUE), 2)) == 0


def test_nothing_that_happens_changes_it() -> None:
    policy = Static(CATALOGUE, profile=PROFILE)
    policy.on_budget_changed(Tier.DEVICE, 120)
    before = policy.target
    policy.on_budget_changed(Tier.DEVICE, 120)
    policy.on_budget_changed(Tier.HOST, 50)
    policy.on_sequence_queued(SequenceInfo(1, "a", 10, 10))
    values = np.ones(24, dtype=np.float32)
    policy.on_prediction(Prediction(PredictionRequest(POPULARITY, (0, 3), task="a"), "1", values))
    policy.on_step_started(step_of(1))
    assert policy.target is before


def test_members_leave_last() -> None:
    policy = Static(CATALOGUE, profile=PROFILE)
    members = wanted(policy, 12)
    every = mask_of(CATALOGUE, range(24))
    asked = VictimRequest(Tier.DEVICE, 10 * (24 - len(members)), every, every, Reason.ON_DEMAND)
    assert set(policy.victims(asked).tolist()) == set(range(24)) - members


def test_a_bad_value_is_refused_by_name() -> None:
    for options, name in (({"share": 0.0}, "share"), ({"share": 1.1}, "share"), ({"seed": -1}, "seed")):
        with pytest.raises(InvalidConfig, match=name):
            Static(CATALOGUE, **options)
    with pytest.raises(InvalidConfig, match="fidelity"):
        Static(CATALOGUE, fidelity="none")
    with pytest.raises(UnknownName, match="sensitivity"):
        Static(CATALOGUE, sensitivity="high")
    with pytest.raises(InvalidConfig, match="profile"):
        Static(Catalogue.uniform("pool", layers=2, experts=8, top_k=2), profile=PROFILE)
