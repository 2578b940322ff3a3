"""MoE-Infinity where a model encodes first and then decodes."""

from __future__ import annotations

import numpy as np
import pytest

from greenroom.policies.base.events import Artifact, LayerRouting, Phase, SequenceEnd, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.policies.moe_infinity.replacement import EPSILON, ActivationRetention
from tests.unit.policies.bench import keys_of

POOL = Catalogue("pool", experts_per_layer=[3] * 4, top_k=[1] * 4, expert_bytes=[1] * 4, decoder_start=2)
NONE = 9


def run(rule: ActivationRetention, number: int, rows: dict[int, tuple[Phase, list[int]]]) -> None:
    """A step of one row a sequence, with its picks in each layer; those of the other half are none."""
    phases = np.array([phase for phase, _ in rows.values()], dtype=np.uint8)
    step = Step("pool", number, keys_of(list(rows)), phases)
    for layer in range(POOL.layers):
        picks = np.array([[own[layer]] for _, own in rows.values()])
        rule.on_layer_routed(LayerRouting.from_picks(POOL, step, layer, picks))


def ratios(rule: ActivationRetention) -> list[float]:
    return [round(float(worth) - EPSILON, 3) for worth in rule.worth(Tier.DEVICE)[0]]


@pytest.mark.parametrize("others", [0, 6])
def test_decoding_sequences_do_not_count_in_the_encoders_layers(others: int) -> None:
    rule = ActivationRetention(POOL, by_layer=False)
    for sequence in range(10, 10 + others):  # more than there was room for
        run(rule, sequence, {sequence: (Phase.ENCODE, [2, 2, NONE, NONE])})
    before = ratios(rule)[:6]
    run(rule, 100, {1: (Phase.ENCODE, [0, 1, NONE, NONE])})
    assert ratios(rule) == [*np.add(before, [1, 0, 0, 0, 1, 0]), *[0] * 6]
    run(rule, 101, {1: (Phase.DECODE, [NONE, NONE, 0, 1]), 2: (Phase.ENCODE, [1, 1, NONE, NONE])})
    assert ratios(rule) == [*np.add(before, [0, 1, 0, 0, 1, 0]), 1, 0, 0, 0, 1, 0]
    assert rule.matrices.ratios[rule.matrices.rows[1], :6].tolist() == [1, 0, 0, 0, 1, 0], "its matrix has all of it"
    rule.on_sequence_ended(1, SequenceEnd.FINISHED)
    assert ratios(rule) == [*np.add(before, [0, 1, 0, 0, 1, 0]), *[0] * 6]
    run(rule, 102, {3: (Phase.ENCODE, [0, 0, NONE, NONE])})
    assert ratios(rule)[:3] == [*np.add(before, [1, 1, 0, 0, 1, 0])[:3]], "the next sequence of its row encodes"


def test_nothing_of_the_encoder_is_foreseen_for_decoding_sequences() -> None:
    policy = MoeInfinity(POOL)
    members = np.array([[4, 0, 0, 4, 0, 0, 2, 0, 0, 2, 0, 0], [0, 4, 0, 0, 4, 0, 0, 2, 0, 0, 2, 0]])
    policy.on_artifact_swapped(Artifact(EAMC, "1", {MATRICES: members}))
    step = Step("pool", 0, keys_of([1, 2]), np.array([Phase.ENCODE, Phase.ENCODE], dtype=np.uint8))
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[0], [1]])))
    assert foreseen(policy) == [3, 4, 6, 7, 9, 10]
    step = Step("pool", 1, keys_of([1, 2]), np.array([Phase.DECODE, Phase.ENCODE], dtype=np.uint8))
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[NONE], [1]])))
    assert foreseen(policy) == [4, 6, 7, 9, 10], "the encoder's 3 was the first one's"
    assert policy.prefetch is not None
    assert policy.prefetch.may_evict is not None
    assert not policy.prefetch.may_evict[[0, 3]].any()
    step = Step("pool", 2, keys_of([1, 2]), np.array([Phase.DECODE, Phase.DECODE], dtype=np.uint8))
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 2, np.array([[0], [1]])))
    assert foreseen(policy) == [9, 10]


def foreseen(policy: MoeInfinity) -> list[int]:
    """Experts of later layers that some member speaks for."""
    assert policy.prefetch is not None
    wanted: list[int] = np.flatnonzero(policy.prefetch.priority > 2 * EPSILON).tolist()
    return wanted


def test_a_model_without_an_encoder_counts_in_all_layers() -> None:
    pool = Catalogue.uniform("pool", layers=2, experts=2, top_k=1)
    rule = ActivationRetention(pool, by_layer=False)
    for number, phase in enumerate((Phase.PREFILL, Phase.DECODE)):
        step = Step("pool", number, keys_of([1]), np.array([phase], dtype=np.uint8))
        for layer in range(2):
            rule.on_layer_routed(LayerRouting.from_picks(pool, step, layer, np.array([[0]])))
    assert ratios(rule) == [1, 0, 1, 0]
