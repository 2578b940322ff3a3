from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import ROUTER, Artifact, LayerRouting, Prediction, Reason, SequenceEnd, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.registry import create_policy
from greenroom.policies.replacement.next_use import NextUse
from greenroom.policies.reuse.chances import REUSE
from greenroom.policies.reuse.policy import Reuse
from greenroom.policies.reuse.replacement import ReuseRetention
from tests.unit.policies.bench import Bench, step_of

POOL = Catalogue.uniform("pool", layers=4, experts=3, top_k=1)  # keys 3 l + e


def artifact(version: str = "1", *, weight: float = 1.0, bias: float = 0.0) -> Artifact:
    """One average, of the last token alone almost."""
    arrays = {
        "keep": np.array([0.1], dtype=np.float32),
        "weights": np.tile(np.array([weight, 0], dtype=np.float32), (POOL.layers, 1)),
        "bias": np.full(POOL.size, bias, dtype=np.float32),
        "followers": np.zeros(0, dtype=np.float32),
    }
    return Artifact(REUSE, version, arrays)


def routed(layer: int, *picks: int, number: int = 0) -> LayerRouting:
    """A row for each pick, each of its own sequence."""
    return LayerRouting.from_picks(POOL, step_of(*range(len(picks)), number=number), layer, np.array(picks)[:, None])


def turn(policy: Reuse | ReuseRetention, *picks: int, number: int = 0) -> None:
    for layer in range(POOL.layers):
        policy.on_layer_routed(routed(layer, *picks, number=number))


def wanted(policy: Reuse) -> dict[int, float]:
    assert policy.prefetch is not None
    priority = policy.prefetch.priority
    return {int(key): round(float(priority[key]), 3) for key in np.flatnonzero(priority)}


def test_what_the_running_sequence_used_last_is_worth_most_and_its_layers_next_turn_discounts() -> None:
    retention = ReuseRetention(POOL)
    retention.on_artifact_swapped(artifact())
    turn(retention, 1)
    worth, tie = retention.worth(Tier.DEVICE)
    assert tie is None
    assert np.argsort(-worth)[:4].tolist() == [1, 4, 7, 10]  # layer 3 has just run: layer 0 is next
    assert retention.next_turn()[[1, 4]] == pytest.approx([0.9333, 0.9333], abs=1e-3)


def test_several_sequences_use_what_any_of_them_does() -> None:
    retention = ReuseRetention(POOL)
    retention.on_artifact_swapped(artifact())
    turn(retention, 0, 1)
    assert (retention.next_turn()[[0, 1]] > 0.9).all()
    assert retention.next_turn()[2] < 0.1
    retention.on_sequence_ended(0, SequenceEnd.FINISHED)
    soon = retention.next_turn()
    assert soon[1] > 0.9 > 0.1 > soon[0]
    turn(retention, 2, number=1)  # sequence 0 is a new one, of which nothing is known
    assert (retention.next_turn()[[1, 2]] > 0.9).all()


def test_later_turns_count_by_the_chance_over_all_as_under_next_use() -> None:
    retention, plain = ReuseRetention(POOL), NextUse(POOL, horizon=0.5)
    for number, pick in enumerate((0, 1, 1, 2)):
        for policy in (retention, plain):
            for layer in range(POOL.layers):
                policy.on_layer_routed(routed(layer, pick, number=number))
    later = retention.worth(Tier.DEVICE)[0] - retention.next_turn() * retention.discounts[-1]
    of_plain = plain.worth(Tier.DEVICE)[0] - plain.next_turn() * plain.discounts[-1]
    assert later == pytest.approx(of_plain)


def test_every_later_expert_that_is_likely_enough_is_wanted_by_chance_and_layer() -> None:
    policy = Reuse(POOL)
    policy.on_artifact_swapped(artifact())
    turn(policy, 1)
    policy.on_step_started(step_of(0, number=1))
    policy.on_layer_routed(routed(0, 1, number=1))
    chance = float(policy.reuse.next_turn()[4])
    assert wanted(policy) == pytest.approx({4: chance * 0.75, 7: chance * 0.5, 10: chance * 0.25}, abs=1e-3)
    policy.on_layer_routed(routed(1, 1, number=1))
    assert wanted(policy) == pytest.approx({7: chance * 0.75, 10: chance * 0.5}, abs=1e-3)
    policy.on_layer_routed(routed(2, 1, number=1))
    policy.on_layer_routed(routed(3, 1, number=1))
    assert wanted(policy) == {}


def test_what_the_next_routers_say_is_believed_rather_than_what_was_used_before() -> None:
    policy = Reuse(POOL, layers=1)
    policy.on_artifact_swapped(artifact())
    turn(policy, 1)
    policy.take_requests()
    policy.on_step_started(step_of(0, number=1))
    policy.on_layer_routed(routed(0, 1, number=1))
    (request,) = policy.take_requests()
    assert (request.kind, request.layers) == (ROUTER, (1, 2))
    policy.on_prediction(Prediction(request, "", np.array([[0.01, 0.01, 0.98]], dtype=np.float32)))
    found = wanted(policy)
    assert set(found) == {5, 7, 10}
    worth, _ = policy.retention.worth(Tier.DEVICE)
    assert worth[5] > worth[4]


def test_coefficients_are_swapped_while_it_runs_and_others_are_passed_over() -> None:
    policy = Reuse(POOL)
    assert policy.version == ""
    turn(policy, 1)
    policy.on_artifact_swapped(artifact("7", weight=0, bias=-2))
    turn(policy, 1, number=1)
    assert policy.version == "7"
    assert policy.reuse.next_turn() == pytest.approx(1 / (1 + np.exp(2)))
    policy.on_artifact_swapped(Artifact("eamc", "8", artifact().arrays))
    policy.on_artifact_swapped(Artifact(REUSE, "9", {**artifact().arrays, "bias": np.zeros(5, dtype=np.float32)}))
    assert policy.version == "7"


def test_options_out_of_range_are_refused() -> None:
    for name, value in (("layers", 0), ("least", 0.0), ("least", 1.5)):
        with pytest.raises(InvalidConfig, match=name):
            create_policy("reuse", catalogue=POOL, options={name: value})
    with pytest.raises(InvalidConfig, match="horizon"):
        ReuseRetention(POOL, horizon=0)


def test_a_prefetch_displaces_what_is_worth_less_than_half_as_much_even_where_that_is_wanted_too() -> None:
    policy = Reuse(POOL)
    policy.on_artifact_swapped(artifact())
    turn(policy, 1)
    policy.on_layer_routed(routed(0, 1, number=1))
    worth, _ = policy.retention.worth(Tier.DEVICE)
    assert {4, 7, 10} <= set(wanted(policy))
    for resident, may in ((10, worth[4] > 2 * worth[10]), (7, worth[4] > 2 * worth[7]), (5, True)):
        engine = Bench(policy)
        engine.arrive(resident)
        victims = policy.victims(engine.request(reason=Reason.PREFETCH, incoming=[4])).tolist()
        assert victims == ([resident] if may else [])
        assert policy.victims(engine.request(incoming=[4])).tolist() == [resident]
    assert worth[4] < 2 * worth[7], "else nothing was refused"


def test_in_an_encoder_decoder_decoding_says_nothing_of_the_encoders_next_turn() -> None:
    pool = Catalogue("pool", experts_per_layer=[3] * 4, top_k=[1] * 4, expert_bytes=[1] * 4, decoder_start=2)
    retention = ReuseRetention(pool)
    retention.on_artifact_swapped(artifact())
    both = step_of(0, 1)  # 0 encodes, 1 decodes
    for layer, picks in ((0, [[0], [9]]), (1, [[1], [9]]), (2, [[9], [2]]), (3, [[9], [2]])):
        retention.on_layer_routed(LayerRouting.from_picks(pool, both, layer, np.array(picks)))
    soon = retention.next_turn()
    plain = NextUse(pool)
    for layer, expert in ((0, 0), (1, 1)):
        plain.on_layer_routed(LayerRouting.from_picks(pool, both, layer, np.array([[expert], [9]])))
    assert soon[:6] == pytest.approx(plain.next_turn()[:6])
    assert soon[[8, 11]].min() > 0.9
    assert soon[[6, 7, 9, 10]].max() < 0.1


def test_it_tells_what_sequences_past_says_and_nothing_of_those_without() -> None:
    policy = Reuse(POOL)
    turn(policy, 1)
    known = policy.past_logits(np.array([5, 0], dtype=np.int64))
    assert np.isnan(known[0]).all()
    assert known[1] == pytest.approx(policy.reuse.chances.logits(np.array([0], dtype=np.int64))[0])
    assert np.isnan(policy.past_logits(np.array([5], dtype=np.int64))).all(), "it has not begun by being asked for"
    assert create_policy("lru", catalogue=POOL).past_logits(np.array([0], dtype=np.int64)) is None
