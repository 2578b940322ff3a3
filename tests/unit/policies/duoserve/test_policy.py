from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.policies.base.events import ROUTER, Artifact, LayerRouting, Phase, Prediction, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.duoserve.policy import DuoServe
from greenroom.policies.foresight.path_weights import PATH, PathLogits, PathWeights
from tests.contract.prepared_policies import path_arrays

LAYERS, EXPERTS = 3, 4
POOL = Catalogue.uniform("p", layers=LAYERS, experts=EXPERTS, top_k=1)
SURE = 9.0


def onward() -> Artifact:
    """A token that picks e picks e + 1 in the next layer and e + 2 in the one after."""
    targets = ((1, (1, 2)), (2, (2,)))  # by layers ahead, what layer 0 says something of; the others likewise
    parts = []
    for layer in range(LAYERS):
        columns = [
            np.where(np.arange(EXPERTS) == (np.arange(EXPERTS)[:, None] + ahead) % EXPERTS, 2 * SURE, 0)
            for ahead, _ in targets
            if layer + ahead < LAYERS
        ]
        parts += [np.concatenate(columns, axis=1).ravel()] if columns else []
    arrays: dict[str, Any] = {
        "window": np.array([1], dtype=np.float32),
        "weights": np.concatenate(parts).astype(np.float16),
        "bias": np.full((2, POOL.size), -SURE, dtype=np.float32),
        "sequence": np.zeros((2, LAYERS), dtype=np.float32),
    }
    return Artifact(PATH, "1", arrays)


def begun(
    *phases: Phase, picks: tuple[int, ...], router: dict[int, float] | None = None, at_once: bool = False
) -> DuoServe:
    """A policy after layer 0 of a step of these rows, each of its own sequence. ``at_once``: it has been told that the
    router answers before anything is fetched."""
    policy = DuoServe(POOL)
    if at_once:
        policy.answered_at_once = frozenset({ROUTER})
    policy.on_artifact_swapped(onward())
    step = Step("p", 1, np.arange(len(phases)), np.array(phases, dtype=np.uint8))
    routing = LayerRouting.from_picks(POOL, step, 0, np.array(picks)[:, None])
    policy.on_step_started(step)
    policy.on_layer_routed(routing)
    requests = {request.kind: request for request in policy.take_requests()}
    for predictor in policy.predictors:
        predictor.on_step_started(step)
        predictor.on_layer_routed(routing)
        if predictor.kind in requests and (answer := predictor.answer(requests[predictor.kind])) is not None:
            policy.on_prediction(answer)
    if router is not None:
        values = np.full((len(phases), 2 * EXPERTS), 0.01, dtype=np.float32)
        for place, weight in router.items():
            values[:, place] = weight
        policy.on_prediction(Prediction(requests[ROUTER], "", values))
    return policy


def wanted(policy: DuoServe) -> list[int]:
    return [] if policy.prefetch is None else np.flatnonzero(policy.prefetch.priority > 0).tolist()


def test_what_a_tokens_path_is_sure_of_is_wanted_in_the_next_two_layers() -> None:
    assert wanted(begun(Phase.DECODE, picks=(1,))) == [EXPERTS + 2, 2 * EXPERTS + 3]


def test_where_the_router_answers_at_once_it_is_decided_once() -> None:
    """By both answers together: the same is wanted, and nothing in between."""
    sure = {1: 0.9}
    for phases in ((Phase.DECODE,), (Phase.DECODE, Phase.PREFILL)):
        picks = (1, 3)[: len(phases)]
        later, sooner = (begun(*phases, picks=picks, router=sure, at_once=one) for one in (False, True))
        assert later.prefetch is not None
        assert sooner.prefetch is not None
        np.testing.assert_array_equal(later.prefetch.priority, sooner.prefetch.priority)
        assert later.prefetch.generation > sooner.prefetch.generation == 0
        assert begun(*phases, picks=picks, at_once=True).prefetch is None


def test_in_a_batch_it_is_wanted_for_any_row() -> None:
    policy = begun(Phase.DECODE, Phase.DECODE, picks=(1, 2))
    assert wanted(policy) == [EXPERTS + 2, EXPERTS + 3, 2 * EXPERTS, 2 * EXPERTS + 3]


def test_prompt_rows_pick_as_all_tokens_do_where_no_router_says_more_and_decoding_ones_by_their_path() -> None:
    policy = begun(Phase.DECODE, Phase.PREFILL, picks=(1, 3))
    chances = policy.reuse.expected()[EXPERTS:].reshape(2, EXPERTS)
    assert wanted(policy) == [EXPERTS + 2], "of the next layer alone, as in every step with prompts"
    assert chances[0, 2] > 0.99
    assert chances[1, 3] > 0.99
    assert np.abs(np.delete(chances, [2, EXPERTS + 3]) - 1 / EXPERTS).max() < 0.01


def test_a_router_speaks_for_prompt_rows_and_with_the_path_for_decoding_ones() -> None:
    policy = begun(Phase.DECODE, Phase.PREFILL, picks=(1, 3), router={0: 0.999})
    chances = policy.reuse.expected()[EXPERTS : 2 * EXPERTS]
    assert chances[0] > 0.9, "by the prompt row's router"
    assert chances[2] > 0.9, "by the decoding row's path, though its router does not think so"
    assert chances[[1, 3]].max() < 0.2


def test_without_weights_nothing_is_asked_of_paths() -> None:
    policy = DuoServe(POOL)
    step = Step("p", 1, np.arange(1), np.array([Phase.DECODE], dtype=np.uint8))
    policy.on_step_started(step)
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[1]])))
    assert [request.kind for request in policy.take_requests()] == [ROUTER]
    policy.on_artifact_swapped(Artifact(PATH, "2", {}))  # unusable: it goes on without
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 1, np.array([[1]])))
    assert [request.kind for request in policy.take_requests()] == [ROUTER]


@pytest.mark.parametrize("phases", [(Phase.DECODE,) * 6, (Phase.DECODE, Phase.PREFILL) * 3])
@pytest.mark.parametrize("with_router", [False, True])
def test_chances_are_those_of_the_plain_formula(phases: tuple[Phase, ...], with_router: bool) -> None:
    """1 − Π(1 − σ(w · (path + gain · sequence) + v · router + b)), prompt rows by their router alone. Where no router
    has spoken for prompt rows, each picks as all tokens do. In a step with prompts only the next layer's are wanted."""
    pool = Catalogue("p", experts_per_layer=[4, 6, 3, 5], top_k=[2] * 4, expert_bytes=[1] * 4)
    rng, policy = np.random.default_rng(0), DuoServe(pool)
    arrays = {**path_arrays(pool, window=3), "sequence": rng.random((2, 4)).astype(np.float32)}
    policy.on_artifact_swapped(Artifact(PATH, "1", arrays))
    policy._lesson_every = 1_000  # no lesson within these steps
    decoding = [row for row, phase in enumerate(phases) if phase is Phase.DECODE]
    for number in range(1, 5):
        step = Step("p", number, np.arange(len(phases)), np.array(phases, dtype=np.uint8))
        prompts = len(phases) - len(decoding)
        not_by_shares = (1 - policy.reuse.chances.over_all.astype(np.float64)) ** prompts
        policy.on_step_started(step)
        logits = PathLogits(PathWeights.of_artifact(pool, Artifact(PATH, "1", arrays)))
        logits.begin(len(decoding))
        for predictor in policy.predictors:
            predictor.on_step_started(step)
        for layer, width in enumerate(pool.experts_per_layer.tolist()):
            picks = np.stack([rng.permutation(width)[:2] for _ in phases])
            routing = LayerRouting.from_picks(pool, step, layer, picks)
            policy.on_layer_routed(routing)
            logits.add(layer, picks[decoding])
            last = min(layer + 3, pool.layers)
            requests = {request.kind: request for request in policy.take_requests()}
            for predictor in policy.predictors:
                predictor.on_layer_routed(routing)
                if predictor.kind in requests and (answer := predictor.answer(requests[predictor.kind])) is not None:
                    policy.on_prediction(answer)
            if last <= layer + 1:
                continue
            keys = slice(int(pool.first[layer + 1]), int(pool.first[last]))
            router = rng.random((len(phases), keys.stop - keys.start)).astype(np.float32)
            if with_router:
                policy.on_prediction(Prediction(requests[ROUTER], "", router))
            own = pool.layer_of[keys]
            known = policy.reuse.chances.logits(np.array(decoding))[:, keys] * arrays["sequence"][own - layer - 1, own]
            path = known.astype(np.float64) + logits.of(layer + 1, last)
            routers = np.log(np.clip(router, 1e-4, 1 - 1e-4) / (1 - np.clip(router, 1e-4, 1 - 1e-4)))
            total = 0.7 * path + 0.7 * routers[decoding] if with_router else path
            asked_of_prompts = np.delete(routers, decoding, axis=0)[: None if with_router else 0]
            none = np.prod(1 / (1 + np.exp(total)), axis=0) * np.prod(1 / (1 + np.exp(asked_of_prompts)), axis=0)
            plain = 1 - none * (1 if with_router else not_by_shares[keys])
            assert np.abs(policy.reuse.expected()[keys] - plain).max() < 1e-5
            wanted_now = policy.prefetch.priority if policy.prefetch is not None else np.zeros(pool.size)
            likely = policy.reuse.expected()[keys] >= np.float32(0.5)
            if prompts:
                likely &= own == layer + 1
            assert (wanted_now[keys] > 0).tolist() == likely.tolist()
            assert not (wanted_now[: keys.start] > 0).any()


def test_the_blends_learn_as_steps_go_by() -> None:
    policy = DuoServe(POOL)
    policy.on_artifact_swapped(onward())
    rng = np.random.default_rng(0)
    for number in range(1, 60):
        step = Step("p", number, np.arange(2), np.full(2, Phase.DECODE, dtype=np.uint8))
        policy.on_step_started(step)
        policy.predictors[0].on_step_started(step)
        for layer in range(LAYERS):
            routing = LayerRouting.from_picks(POOL, step, layer, rng.integers(EXPERTS, size=(2, 1)))
            policy.on_layer_routed(routing)
            policy.predictors[0].on_layer_routed(routing)
            for request in policy.take_requests():
                if request.kind == PATH and (answer := policy.predictors[0].answer(request)) is not None:
                    policy.on_prediction(answer)
    foreseen = {(layer, ahead) for layer in range(LAYERS) for ahead in (1, 2) if layer >= ahead}
    assert set(policy._blends) == {(*each, (True, False, False)) for each in foreseen}, "no router has spoken"
    for layer, ahead in foreseen:
        learnt = policy._blends[layer, ahead, (True, False, False)]
        assert learnt.weights[0] < 1, "picks are drawn: what the path is sure of is wrong"
        columns = policy._columns(layer - ahead, layer, layer + 1)
        used = policy._blended[True, False, False][:, columns]
        assert used[0].tolist() == np.full(EXPERTS, learnt.weights[0], dtype=np.float32).tolist()
        assert used[1].tolist() == learnt.bias.astype(np.float32).tolist()


def test_what_is_wanted_is_decided_without_a_path_that_will_not_answer() -> None:
    """Weights that come within a step are used from the next one on, and picks may not have been recorded."""
    policy = begun(Phase.DECODE, picks=(1,))
    assert wanted(policy) == [EXPERTS + 2, 2 * EXPERTS + 3]
    policy.on_artifact_swapped(onward())
    step = Step("p", 1, np.arange(1), np.array([Phase.DECODE], dtype=np.uint8))
    policy.on_layer_routed(LayerRouting.from_picks(POOL, step, 1, np.array([[2]])))
    assert wanted(policy) == [2 * EXPERTS + 3], "no longer what lies behind, still what was foreseen two layers ahead"
    policy.predictors[0].on_step_started(step)
    nobody_knows = LayerRouting(POOL, step, 2, np.array([2 * EXPERTS]), np.array([1]))
    policy.on_layer_routed(nobody_knows)
    assert wanted(policy) == []


@pytest.mark.parametrize(("phase", "own"), [(Phase.ENCODE, slice(0, 16)), (Phase.PREFILL, slice(16, 32))])
def test_prompts_of_an_encoder_decoder_expect_only_the_part_that_they_run_through(phase: Phase, own: slice) -> None:
    pool = Catalogue("p", experts_per_layer=[8] * 4, top_k=[2] * 4, expert_bytes=[1] * 4, decoder_start=2)
    policy, first = DuoServe(pool), own.start // 8
    step = Step("p", 1, np.zeros(50, dtype=np.int64), np.full(50, phase, dtype=np.uint8))
    policy.on_step_started(step)
    expected = policy.reuse.expected()
    assert expected[own].min() > 0.99
    assert np.delete(expected, np.r_[own]).max() < 0.5
    for layer in (first, first + 1):
        policy.on_layer_routed(LayerRouting.from_picks(pool, step, layer, np.tile([[0, 1]], (50, 1))))
        ahead = wanted(policy)
        assert ahead == ([*range(8 * first + 8, 8 * first + 16)] if layer == first else [])
