"""What DuoServe-MoE as printed decides (§5.2, §5.3)."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.events import LayerRouting, Phase, Prediction, PredictionRequest, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.duoserve.literal import EXPERT_MLP, LiteralDuoServe, foreseen
from greenroom.policies.duoserve.policy import DuoServe
from greenroom.policies.registry import check_given, check_taken, create_policy, policy_class, spelling
from tests.unit.policies.bench import mask_of, step_of

EXPERTS, K = 4, 2
POOL = Catalogue.uniform("p", layers=3, experts=EXPERTS, top_k=K)
LIKELY, UNLIKELY = 3.0, -3.0


def begun(*picks: tuple[int, int], layer: int = 0, phase: Phase = Phase.DECODE) -> LiteralDuoServe:
    """After this layer of a step whose rows, each of its own sequence, have these picks."""
    policy, step = LiteralDuoServe(POOL), step_of(*range(len(picks)), number=1, phase=phase)
    policy.on_budget_changed(Tier.DEVICE, K)
    policy.on_step_started(step)
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, layer, np.array(picks)))
    return policy


def wanted(policy: LiteralDuoServe) -> list[int]:
    assert policy.target is not None
    assert policy.target.drop_others, "nothing else is kept"
    return np.flatnonzero(policy.target.wanted).tolist()


def answered(policy: LiteralDuoServe, *rows: list[float]) -> PredictionRequest:
    (request,) = policy.take_requests()
    policy.on_prediction(Prediction(request, "1", np.array(rows, dtype=np.float32)))
    return request


def test_one_row_wants_its_likeliest_of_the_next_layer_and_nothing_else() -> None:
    policy = begun((0, 1))
    assert wanted(policy) == [], "before it is foretold nothing of another layer is"

    request = answered(policy, [LIKELY, UNLIKELY, UNLIKELY, -1.0])

    assert (request.kind, request.layers) == (EXPERT_MLP, (1, 2))
    assert wanted(policy) == [EXPERTS, EXPERTS + 3], "the top-2, however unlikely the second"


def test_what_was_foreseen_of_a_layer_is_given_up_when_it_is_routed() -> None:
    policy = begun((0, 1))
    answered(policy, [LIKELY, LIKELY, UNLIKELY, UNLIKELY])
    step = step_of(0, number=1)
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 1, np.array([[0, 2]])))

    assert wanted(policy) == []


def test_the_first_layer_is_not_foreseen() -> None:
    policy = begun((0, 1), layer=POOL.layers - 1)
    assert policy.take_requests() == ()
    assert wanted(policy) == []


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.ENCODE])
def test_prompts_ask_nothing_and_want_the_next_layers_first(phase: Phase) -> None:
    policy = LiteralDuoServe(POOL)
    policy.on_step_started(step_of(0, 0, phase=phase))
    assert wanted(policy) == [0], "while what precedes the first layer's experts is computed"

    policy = begun((3, 1), (2, 0), phase=phase)

    assert policy.take_requests() == ()
    assert wanted(policy) == [EXPERTS]


def test_prompts_stream_in_ascending_order_and_answers_do_not() -> None:
    for phase, streams in ((Phase.PREFILL, True), (Phase.DECODE, False)):
        policy = begun((3, 1), phase=phase)
        routing = LayerRouting.from_picks(POOL, step_of(0, phase=phase), 0, np.array([[3, 1]]))
        order = policy.compute_order(routing, mask_of(POOL, [3]))
        assert policy.streams(routing, routing.experts) is streams
        assert (order is not None and order.tolist() == [1, 3]) is streams


def test_an_answer_of_another_shape_or_to_another_question_is_none() -> None:
    policy = begun((0, 1))
    (request,) = policy.take_requests()
    values = np.full((1, EXPERTS), LIKELY, dtype=np.float32)
    policy.on_prediction(Prediction(PredictionRequest(EXPERT_MLP, (1, 2), step=1), "1", values))
    policy.on_prediction(Prediction(request, "1", values.repeat(2, axis=0)))
    policy.on_prediction(Prediction(request, "1", values[:, :3]))
    assert wanted(policy) == []

    policy.on_step_started(step_of(0, number=2))
    policy.on_prediction(Prediction(request, "1", values))
    assert wanted(policy) == [], "its step is over"


def test_several_rows_want_what_any_of_them_wants() -> None:
    """0.5 and 0.5 make 0.75; 0.6 and nothing 0.6."""
    rows = np.array([[0.0, 0.405, -9, -9], [0.0, -9, -9, -9]], dtype=np.float32)
    assert foreseen(rows, 1, 4).tolist() == [0]
    assert foreseen(rows[:1], 1, 4).tolist() == [1]
    sure = np.array([[9, 9, -9, -9], [-9, 9, 9, -9]], dtype=np.float32)
    assert sorted(foreseen(sure, 2, 4).tolist()) == [0, 1, 2], "as many as the chances sum up to"
    assert foreseen(sure, 2, 2).tolist() == [1, 0], "no more than there are slots"
    assert len(foreseen(-sure - 18, 2, 4)) == 2, "and no fewer than a row picks"


@pytest.mark.parametrize("layer", [0, 1])
def test_several_rows_want_no_more_than_there_are_slots_of_the_size(layer: int) -> None:
    pool = Catalogue("p", experts_per_layer=[8] * 3, top_k=[K] * 3, expert_bytes=[30, 10, 30])
    sizes, policy, step = SlotSizes(pool), LiteralDuoServe(pool), step_of(*range(4), number=1)
    small, large = sizes.places(8).tolist()
    policy.on_budget_changed(Tier.DEVICE, sizes.nbytes(8))
    policy.on_step_started(step)
    policy.on_layer_routed(LayerRouting.from_picks(pool, step, layer, np.array([[0, 1]] * 4)))
    answered(policy, *[[LIKELY] * 8] * 4)

    assert len(wanted(policy)) == (small, large)[layer] < 8


def test_a_logit_that_is_none_counts_as_never() -> None:
    found = foreseen(np.array([[np.nan, -50.0, np.inf, -np.inf]], dtype=np.float32), 2, 4)
    assert found.tolist() == [2, 1]


def test_what_is_foreseen_leaves_last_and_the_least_recently_used_first() -> None:
    policy = begun((2, 1))
    answered(policy, [LIKELY, LIKELY, UNLIKELY, UNLIKELY])
    inside = mask_of(POOL, [1, 2, 4, 5, 6])

    def victims(count: int, tier: Tier = Tier.DEVICE) -> list[int]:
        return [*map(int, policy.victims(VictimRequest(tier, count, inside, inside)))]

    assert victims(3) == [6, 1, 2]
    assert victims(5) == [6, 1, 2, 4, 5]
    assert victims(3, Tier.HOST) == [4, 5, 6]


def test_an_option_chooses_it() -> None:
    assert type(create_policy("duoserve", catalogue=POOL, options={"literal": True})) is LiteralDuoServe
    assert type(create_policy("duoserve", catalogue=POOL, options={"literal": False})) is DuoServe
    assert policy_class("duoserve", {"literal": True}) is LiteralDuoServe
    assert policy_class("duoserve", {}) is DuoServe
    with pytest.raises(InvalidConfig, match=r"literal: 1 .*true or false"):
        create_policy("duoserve", catalogue=POOL, options={"literal": 1})
    with pytest.raises(InvalidConfig, match="duoserve:literal=true takes no options"):
        create_policy("duoserve", catalogue=POOL, options={"literal": True, "layers": 1})
    with pytest.raises(UnknownName, match="known: evict, layers, least, literal"):
        create_policy("duoserve", catalogue=POOL, options={"litral": True})


def test_it_is_refused_without_its_network() -> None:
    literal = ("duoserve", {"literal": True})
    check_given(["expert_mlp"], *literal)
    check_given([], "duoserve", {})
    with pytest.raises(InvalidConfig, match=r"expert_mlp: None .*`greenroom expert-mlp fit`.*duoserve:literal=true"):
        check_given(["path", "reuse"], *literal)
    check_taken("expert_mlp", "a.safetensors", [literal])
    with pytest.raises(InvalidConfig, match=r"duoserve takes no expert_mlp.*choose the policy duoserve:literal=true"):
        check_taken("expert_mlp", "a.safetensors", [("duoserve", {})])


@pytest.mark.parametrize(
    ("name", "options", "written"),
    [
        ("duoserve", {"literal": True}, "duoserve:literal=true"),
        ("duoserve", {"literal": False, "layers": 1}, "duoserve"),
        ("reuse", None, "reuse"),
    ],
)
def test_a_class_is_spelt_as_users_write_it(name: str, options: dict[str, object] | None, written: str) -> None:
    assert spelling(name, options) == written
