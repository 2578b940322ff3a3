from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact, LayerRouting, Phase, Reason, SequenceEnd, SequenceInfo, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.moe_infinity.policy import RECALL, MoeInfinity
from greenroom.policies.moe_infinity.replacement import EPSILON, ActivationRetention
from tests.unit.policies.bench import Bench, keys_of, step_of, transfer_of

POOL = Catalogue.uniform("pool", layers=4, experts=3, top_k=1)  # keys 3 l + e
MEMBERS = np.array(
    [
        [8, 0, 0, 6, 2, 0, 0, 8, 0, 0, 0, 8],  # 0, then 3 and 4, 7, 11
        [0, 8, 0, 0, 0, 8, 8, 0, 0, 8, 0, 0],  # 1, then 5, 6, 9
    ]
)


def routed(
    layer: int, *picks: int, sequences: Sequence[int] | None = None, phase: Phase = Phase.DECODE
) -> LayerRouting:
    """A row for each pick, each of its own sequence unless they are named."""
    owners = keys_of(sequences if sequences is not None else range(len(picks)))
    step = Step("pool", 0, owners, np.full(len(picks), phase, dtype=np.uint8))
    return LayerRouting.from_picks(POOL, step, layer, np.array(picks)[:, None])


def with_members(**options: bool) -> MoeInfinity:
    policy = MoeInfinity(POOL, **options)
    policy.on_artifact_swapped(Artifact(EAMC, "7", {MATRICES: MEMBERS}))
    return policy


def priorities(policy: MoeInfinity) -> dict[int, float]:
    assert policy.prefetch is not None
    array = policy.prefetch.priority
    return {int(key): round(float(array[key]), 4) for key in np.flatnonzero(array > 0.1)}


def test_every_later_expert_has_the_nearest_members_share_discounted_by_its_layer() -> None:
    policy = with_members()
    policy.on_layer_routed(routed(0, 0))
    assert policy.prefetch is not None
    assert priorities(policy) == pytest.approx({3: 0.5625, 4: 0.1875, 7: 0.5, 11: 0.25}, abs=EPSILON)
    assert policy.prefetch.priority[:3].tolist() == [0, 0, 0]
    assert policy.prefetch.priority[[5, 6, 9]].tolist() == pytest.approx(
        [EPSILON * 0.75, EPSILON * 0.5, EPSILON * 0.25]
    )
    assert policy.prefetch.may_evict is not None
    assert np.flatnonzero(policy.prefetch.may_evict).tolist() == [0, 3, 4, 7, 11]


def test_without_priorities_a_prefetch_is_not_held_back_by_them_either() -> None:
    for policy, allowed in ((with_members(priorities=False), [7]), (with_members(), [])):
        engine = Bench(policy)
        engine.arrive(7)
        policy.on_layer_routed(routed(0, 0))
        assert policy.victims(engine.request(reason=Reason.PREFETCH, incoming=[11])).tolist() == allowed


def test_the_prediction_is_made_anew_at_every_layer_and_ends_with_the_last() -> None:
    policy = with_members()
    policy.on_layer_routed(routed(0, 2))  # neither member knows it
    policy.on_layer_routed(routed(1, 2))
    assert priorities(policy) == pytest.approx({6: 0.75, 9: 0.5}, abs=EPSILON)
    policy.on_layer_routed(routed(2, 0))
    policy.on_layer_routed(routed(3, 0))
    assert policy.prefetch is not None
    assert policy.prefetch.generation == 3
    assert not policy.prefetch.priority.any()


def test_without_refinement_it_is_made_once_after_the_first_router() -> None:
    policy = with_members(refine=False)
    step = step_of(0)
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[0]])))
    assert policy.prefetch is not None
    first = policy.prefetch.priority.tolist()
    # The other member's expert, and too late for what was wanted of this layer.
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 1, np.array([[2]])))
    assert policy.prefetch.priority.tolist() == [0] * 6 + first[6:]


def test_without_refinement_a_prefetch_is_compared_by_the_layer_that_runs() -> None:
    policy = with_members(refine=False)
    engine = Bench(policy)
    step = step_of(0)
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[0]])))
    engine.arrive(3)
    later = engine.request(reason=Reason.PREFETCH, incoming=[11])
    assert policy.victims(later).tolist() == []  # 3 comes sooner
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 1, np.array([[0]])))
    assert policy.victims(later).tolist() == [3]  # it has had its turn


def test_the_first_router_of_a_step_is_that_of_the_first_layer_that_runs() -> None:
    policy = with_members(refine=False)
    policy.on_layer_routed(routed(2, 0))  # a decoder's first
    assert priorities(policy) == pytest.approx({9: 0.75}, abs=EPSILON)


def test_without_priorities_all_later_experts_are_wanted_alike() -> None:
    policy = with_members(priorities=False)
    policy.on_layer_routed(routed(1, 0))
    assert policy.prefetch is not None
    assert policy.prefetch.may_evict is not None
    assert policy.prefetch.priority.tolist() == [0] * 6 + [1] * 6
    assert np.flatnonzero(policy.prefetch.may_evict).tolist() == [0, 3, 4, 7, 11]


def test_the_literal_form_lets_experts_that_nothing_speaks_for_displace_others() -> None:
    policy = with_members(literal=True)
    policy.on_layer_routed(routed(0, 0))
    assert policy.prefetch is not None
    assert policy.prefetch.may_evict is None


def test_what_several_sequences_are_likely_to_need_is_summed() -> None:
    policy = with_members()
    policy.on_layer_routed(routed(0, 0, 1))
    assert priorities(policy) == pytest.approx(
        {3: 0.5625, 4: 0.1875, 5: 0.75, 6: 0.5, 7: 0.5, 9: 0.25, 11: 0.25}, abs=2 * EPSILON
    )
    policy.on_sequence_ended(1, SequenceEnd.FINISHED)
    policy.on_layer_routed(routed(1, 0))
    assert priorities(policy) == pytest.approx({7: 0.75, 11: 0.5}, abs=EPSILON)


def test_without_a_collection_it_only_caches() -> None:
    policy = MoeInfinity(POOL)
    policy.on_layer_routed(routed(0, 0))
    assert policy.prefetch is None
    for artifact in (Artifact("popularity", "1", {}), Artifact(EAMC, "1", {MATRICES: np.ones((2, 5))})):
        policy.on_artifact_swapped(artifact)
    policy.on_layer_routed(routed(1, 0))
    assert policy.prefetch is None
    assert policy.version == ""


def test_a_new_collection_is_used_for_the_sequences_that_run_from_the_next_layer_on() -> None:
    policy = MoeInfinity(POOL)
    policy.on_layer_routed(routed(0, 1))
    policy.on_artifact_swapped(Artifact(EAMC, "7", {MATRICES: MEMBERS}))
    policy.on_layer_routed(routed(1, 0))  # by itself this layer speaks for the other member as much
    assert policy.version == "7"
    policy.on_artifact_swapped(Artifact(EAMC, "8", {MATRICES: MEMBERS[1:]}))
    policy.on_layer_routed(routed(2, 1))
    assert priorities(policy) == pytest.approx({9: 0.75}, abs=EPSILON)


def test_what_was_prepared_elsewhere_is_used_as_it_is() -> None:
    given = Artifact(EAMC, "7", {MATRICES: MEMBERS})
    policy = MoeInfinity(POOL)
    prepared = policy.prepare(given)
    assert policy.version == ""
    assert given.prepared is None
    assert policy.prepare(prepared) is prepared
    policy.on_artifact_swapped(prepared)
    other = with_members()
    for one in (policy, other):
        one.on_layer_routed(routed(0, 0))
    assert (policy.version, priorities(policy)) == (other.version, priorities(other))
    elsewhere = Artifact("popularity", "1", {})
    assert policy.prepare(elsewhere) is elsewhere
    with pytest.raises(InvalidConfig, match="has so many experts"):
        policy.prepare(Artifact(EAMC, "1", {MATRICES: np.ones((2, 5))}))


def test_a_step_without_rows_changes_nothing() -> None:
    policy = with_members()
    policy.on_layer_routed(routed(0, 0))
    before = policy.prefetch
    policy.on_layer_routed(
        LayerRouting(POOL, Step("pool", 1, keys_of([]), np.empty(0, np.uint8)), 1, keys_of([]), keys_of([]))
    )
    assert policy.prefetch is before
    assert policy.retention.matrices.counts.sum() == 1


def test_a_row_that_another_sequence_got_is_not_taken_for_the_first_ones() -> None:
    """Within a step, too: its sequence is cancelled between two layers, and another one begins."""
    policy = with_members()
    step = Step("pool", 0, keys_of([3]), np.full(1, Phase.DECODE, dtype=np.uint8))
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[0]])))
    policy.on_sequence_ended(3, SequenceEnd.CANCELLED)
    policy.on_layer_routed(routed(0, 1, sequences=[4]))
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 1, np.array([[2]])))
    matrices = policy.retention.matrices
    assert matrices.rows[3] != matrices.rows[4]
    assert matrices.counts[matrices.rows[4]].nonzero()[0].tolist() == [1]
    assert matrices.counts[matrices.rows[3]].nonzero()[0].tolist() == [5]


def test_rows_of_a_preempted_sequence_count_once_when_they_run_again() -> None:
    policy, undisturbed = with_members(), with_members()
    for one in (policy, undisturbed):
        one.on_layer_routed(routed(0, 0, 1, sequences=[3, 4]))
    policy.on_sequence_preempted(SequenceInfo(3))
    assert policy.retention.matrices.counts.sum() == 1
    policy.on_layer_routed(routed(0, 0, sequences=[3]))
    for one in (policy, undisturbed):
        matrices = one.retention.matrices
        assert [matrices.counts[matrices.rows[each]].nonzero()[0].tolist() for each in (3, 4)] == [[0], [1]]
        assert matrices.counts.sum() == 2


def test_retention_is_the_sequences_share_of_a_layer_less_for_later_layers() -> None:
    rule = ActivationRetention(POOL)
    rule.on_layer_routed(routed(0, 0, 0, 1, 2, sequences=[5, 5, 5, 5]))
    rule.on_layer_routed(routed(2, 1, sequences=[5]))
    worth, tie = rule.worth(Tier.DEVICE)
    assert tie is None
    assert worth[[0, 1, 2]].tolist() == pytest.approx([0.501, 0.251, 0.251])
    assert worth[[6, 7, 8]].tolist() == pytest.approx([0.0005, 0.5005, 0.0005])
    assert worth[[3, 9]].tolist() == pytest.approx([0.00075, 0.00025])
    rule.on_sequence_ended(5, SequenceEnd.FINISHED)
    assert rule.worth(Tier.DEVICE)[0].max() == pytest.approx(EPSILON)


def test_layer_decay_and_activation_ratio_can_be_had_alone() -> None:
    by_layer = ActivationRetention(POOL, by_ratio=False)
    by_ratio = ActivationRetention(POOL, by_layer=False)
    for rule in (by_layer, by_ratio):
        rule.on_layer_routed(routed(3, 1))
    assert by_layer.worth(Tier.DEVICE)[0].tolist() == [1, 1, 1, 0.75, 0.75, 0.75, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25]
    assert by_ratio.worth(Tier.HOST)[0][10] == pytest.approx(1 + EPSILON)
    assert by_ratio.worth(Tier.HOST)[0][0] == pytest.approx(EPSILON)


def test_after_encoding_layers_count_from_the_decoders_first() -> None:
    pool = Catalogue(
        "pool", experts_per_layer=[3] * 4, top_k=[1] * 4, expert_bytes=[1] * 4, decoder_start=2
    )  # fmt: skip
    rule = ActivationRetention(pool, by_ratio=False)
    assert rule.worth(Tier.DEVICE)[0][::3].tolist() == [1, 0.75, 0.5, 0.25]
    rule.on_layer_routed(routed(0, 1, phase=Phase.ENCODE))
    assert rule.worth(Tier.DEVICE)[0][::3].tolist() == [1, 0.75, 0.5, 0.25]
    rule.on_layer_routed(routed(2, 1))
    assert rule.worth(Tier.DEVICE)[0][::3].tolist() == [0.5, 0.25, 1, 0.75]


def test_a_prefetched_expert_stays_until_it_is_used_or_no_longer_foreseen() -> None:
    policy = with_members()
    bench = Bench(policy)
    policy.on_layer_routed(routed(0, 0))
    bench.arrive(0, 1, 2)
    bench.arrive(7, 11, reason=Reason.PREFETCH)
    assert bench.victims(4) == [1, 2, 0, 11]
    assert policy.victims(bench.request(4, reason=Reason.PREFETCH, incoming=[4])).tolist() == []
    assert policy.victims(bench.request(1, reason=Reason.PREFETCH, incoming=[4])).tolist() == [1]
    policy.on_layer_routed(routed(1, 2))
    policy.on_layer_routed(routed(2, 0))  # the other member is nearer: nothing speaks for 7 and 11 any more
    assert bench.victims(2) == [11, 7]


def test_the_literal_form_displaces_what_was_fetched_before() -> None:
    policy = with_members(literal=True)
    bench = Bench(policy)
    policy.on_layer_routed(routed(0, 0))
    bench.arrive(7, 11, reason=Reason.PREFETCH)
    assert policy.victims(bench.request(1, reason=Reason.PREFETCH, incoming=[4])).tolist() == [11]


def test_an_expert_that_was_used_or_evicted_is_no_longer_ahead() -> None:
    policy = with_members()
    bench = Bench(policy)
    policy.on_layer_routed(routed(0, 0))
    bench.arrive(0, 1, 2)
    bench.arrive(3, 7, reason=Reason.PREFETCH)
    policy.on_layer_routed(routed(1, 0))
    bench.evict(7)
    bench.arrive(7)
    assert bench.victims(3) == [7, 1, 2]
    policy.on_transfer_done(transfer_of(7, reason=Reason.PREFETCH, target=Tier.HOST))
    assert bench.victims(1) == [7]  # there it is not ahead of anything


def test_an_expert_prefetched_to_the_host_stays_there_until_it_is_on_the_device() -> None:
    policy = with_members()
    bench = Bench(policy)
    policy.on_layer_routed(routed(0, 0))
    bench.arrive(1, 2, tier=Tier.HOST)
    bench.arrive(11, reason=Reason.PREFETCH, tier=Tier.HOST)
    assert bench.victims(3, tier=Tier.HOST) == [1, 2, 11]  # by their layers alone the last one would go first
    bench.arrive(11, reason=Reason.PREFETCH)
    assert bench.victims(3, tier=Tier.HOST) == [11, 1, 2]


def test_a_sequences_recall_is_the_share_of_its_experts_that_were_foreseen() -> None:
    policy = with_members()
    policy.on_layer_routed(routed(0, 0, sequences=[3]))  # the first member, until anything is known
    policy.on_layer_routed(routed(1, 0, sequences=[3]))  # foreseen: 3
    policy.on_layer_routed(routed(2, 0, sequences=[3]))  # foreseen was 7
    policy.on_layer_routed(routed(3, 2, sequences=[3]))  # foreseen: 11
    policy.on_sequence_ended(3, SequenceEnd.FINISHED)
    assert policy.report(3) == {RECALL: 0.75}
    assert policy.report(3) == {}
    policy.on_sequence_ended(4, SequenceEnd.FINISHED)
    assert policy.report(4) == {}


def test_what_lands_when_its_layer_waits_for_it_or_has_run_is_not_ahead() -> None:
    policy = with_members()
    bench = Bench(policy)
    policy.on_layer_routed(routed(0, 0))
    policy.on_layer_routed(routed(1, 0))
    bench.arrive(3, reason=Reason.PREFETCH)  # used right now
    bench.arrive(4, reason=Reason.PREFETCH)  # not used
    bench.arrive(7, reason=Reason.PREFETCH)  # of the next layer
    assert bench.victims(2) == [4, 3]


@pytest.mark.parametrize(
    ("incoming", "victim", "may"),
    [(3, 0, True), (3, 11, True), (7, 4, True), (4, 11, False), (4, 0, False), (11, 7, False), (3, 5, True)],
)
def test_a_prefetch_displaces_only_experts_that_its_member_gives_less_or_a_later_turn(
    incoming: int, victim: int, may: bool
) -> None:
    for policy, allowed in ((with_members(), may), (with_members(literal=True), True)):
        engine = Bench(policy)
        engine.arrive(victim)
        policy.on_layer_routed(routed(0, 0))  # then 3 and 7 count 0.6, 11 0.4, 4 and 0 (in the next step) 0.2
        asked = engine.request(reason=Reason.PREFETCH, incoming=[incoming])
        assert policy.victims(asked).tolist() == ([victim] if allowed else [])
        assert policy.victims(engine.request(incoming=[incoming])).tolist() == [victim]
