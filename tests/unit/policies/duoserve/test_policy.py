from __future__ import annotations

from typing import Any

import numpy as np

from greenroom.policies.base.events import ROUTER, Artifact, LayerRouting, Phase, Prediction, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.duoserve.path_weights import PATH
from greenroom.policies.duoserve.policy import DuoServe

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


def begun(*phases: Phase, picks: tuple[int, ...], router: dict[int, float] | None = None) -> DuoServe:
    """A policy after layer 0 of a step of these rows, each of its own sequence."""
    policy = DuoServe(POOL)
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


def test_in_a_batch_it_is_wanted_for_any_row() -> None:
    policy = begun(Phase.DECODE, Phase.DECODE, picks=(1, 2))
    assert wanted(policy) == [EXPERTS + 2, EXPERTS + 3, 2 * EXPERTS, 2 * EXPERTS + 3]


def test_prompt_rows_are_left_to_reuse_where_no_router_says_more() -> None:
    mixed, plain = begun(Phase.DECODE, Phase.PREFILL, picks=(1, 3)), DuoServe(POOL)
    step = Step("p", 1, np.arange(2), np.array([Phase.DECODE, Phase.PREFILL], dtype=np.uint8))
    plain.on_step_started(step)
    plain.on_layer_routed(LayerRouting.from_picks(POOL, step, 0, np.array([[1], [3]])))
    assert mixed.reuse.expected().tolist() == plain.reuse.expected().tolist()


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
