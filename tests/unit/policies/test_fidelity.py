"""Which rows are confined to the resident experts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Phase, SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.fidelity import FIDELITIES, Confinement, Fidelity, check_profile
from tests.unit.policies.model_profiles import model_profile, task_profile

LAYERS, EXPERTS, TOP_K = 4, 6, 2
CATALOGUE = Catalogue.uniform("", layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
INSENSITIVE = {"none": 0, "some": 2, "all": LAYERS}


def profile(layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K) -> ModelProfile:
    flat = [[1.0] * experts] * layers
    return model_profile({task: task_profile(flat, insensitive=n) for task, n in INSENSITIVE.items()}, top_k=top_k)


def step(*sequences: int) -> Step:
    return Step("", 1, np.array(sequences, dtype=np.int64), np.full(len(sequences), Phase.DECODE, dtype=np.uint8))


@given(
    name=st.sampled_from([one for one in FIDELITIES if one != "exact"]),
    tasks=st.lists(st.sampled_from([*INSENSITIVE, "unheard-of"]), min_size=1, max_size=4),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    resident=st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS),
)
def test_a_row_may_go_to_all_experts_or_to_the_resident_ones(
    name: str, tasks: list[str], rows: list[int], resident: list[bool]
) -> None:
    confinement = Confinement(Fidelity(name, profile()), CATALOGUE)
    rows = [row % len(tasks) for row in rows]
    for number, task in enumerate(tasks):
        confinement.sequence_queued(SequenceInfo(number, task))
    confinement.step_started(step(*rows))
    here: Mask = np.array([resident])
    for layer in range(LAYERS):
        mask = confinement.confine(layer, here)
        for row, sequence in enumerate(rows):
            insensitive = name == "paper" or layer < INSENSITIVE.get(tasks[sequence], 0)
            may = np.ones(EXPERTS, dtype=bool) if mask is None else np.broadcast_to(mask, (len(rows), EXPERTS))[row]
            if insensitive and here.sum() >= TOP_K:
                assert may.tolist() == resident
            else:
                assert may.all()
        alike = {name == "paper" or layer < INSENSITIVE.get(tasks[sequence], 0) for sequence in rows}
        if mask is not None and alike == {True}:
            assert mask is here, "the same array each time, so that nothing need be asked of it again"


def test_a_sequence_that_has_ended_is_of_an_unknown_task() -> None:
    confinement = Confinement(Fidelity("sensitive", profile()), CATALOGUE)
    here: Mask = np.array([[True, True, True, False, False, False]])
    confinement.sequence_queued(SequenceInfo(7, "all"))
    confinement.step_started(step(7))
    assert confinement.confine(LAYERS - 1, here) is here
    confinement.sequence_ended(7)
    confinement.step_started(step(7))
    assert confinement.confine(0, here) is None


def test_rows_of_several_tasks_are_told_apart() -> None:
    confinement = Confinement(Fidelity("sensitive", profile()), CATALOGUE)
    for number, task in enumerate(INSENSITIVE):
        confinement.sequence_queued(SequenceInfo(number, task))
    here: Mask = np.array([[True, False, True, False, True, False]])
    confinement.step_started(step(2, 0, 1, 2))
    mask = confinement.confine(1, here)
    assert mask is not None
    assert mask.tolist() == [here[0].tolist(), [True] * EXPERTS, here[0].tolist(), here[0].tolist()]
    mask = confinement.confine(2, here)
    assert mask is not None
    assert [row.all() for row in mask] == [False, True, True, False]


def test_another_name_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="fidelity: 'lossy' is not allowed; allowed: exact, sensitive, paper"):
        Fidelity("lossy")


def test_sensitive_needs_a_profile() -> None:
    with pytest.raises(InvalidConfig, match="greenroom profile"):
        Fidelity("sensitive")


@pytest.mark.parametrize(
    "other",
    [profile(layers=LAYERS + 1), profile(experts=EXPERTS + 1), profile(top_k=1)],
    ids=["layers", "experts", "k"],
)
def test_a_profile_of_another_shape_is_refused_naming_both(other: ModelProfile) -> None:
    check_profile(profile(), CATALOGUE, "the-model")
    theirs = f"{other.layers} MoE layers of {other.experts} experts, {other.top_k} for a row"
    own = "the-model has 4 MoE layers of 6 experts, 2 for a row"
    with pytest.raises(InvalidConfig) as refused:
        check_profile(other, CATALOGUE, "the-model")
    assert theirs in str(refused.value)
    assert own in str(refused.value)
