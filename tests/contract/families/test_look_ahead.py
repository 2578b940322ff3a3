"""Every decoder-only family's routers can be run ahead of their layers, and predict the better the nearer they are."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.core.artifacts.residual_file import LayerMaps, ResidualFile, ResidualForm
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.source import PredictsFor
from greenroom.moe.loading.load_model import attach
from greenroom.moe.routing.residual_maps import ResidualMaps
from greenroom.moe.routing.router_look_ahead import LookAhead
from greenroom.policies.base.events import ROUTER, Prediction, PredictionRequest
from tests.contract.families.pairs import Pair, Pairs, logits, prompts
from tests.contract.families.sources import ScriptedExperts
from tests.random_checkpoints import DECODER_ONLY


class Asking(ScriptedExperts):
    """Asks at every layer for all layers from this one on; remembers the answers by layer."""

    asks = frozenset({ROUTER})

    def reset(self) -> None:
        super().reset()
        self.answers: dict[int, Prediction] = {}
        self.layer = 0

    def layer_entered(self, layer: int) -> None:
        super().layer_entered(layer)
        self.layer = layer

    def take_request(self, kind: str) -> PredictionRequest | None:
        assert kind == ROUTER
        return PredictionRequest(ROUTER, (self.layer, len(self._weights)))

    def answers_at_once(self, kind: str) -> None:
        assert kind == ROUTER

    def mark(self) -> Mark:
        raise RuntimeError("the CPU computes in order")

    def predicted(self, prediction: Prediction) -> None:
        self.answers[prediction.request.layers[0]] = prediction


def asking(pair: Pair) -> Asking:
    source = Asking(pair.source._weights)
    assert isinstance(source, PredictsFor)
    attach(pair.loaded, source)
    return source


def picked(values: Any, count: int) -> list[list[int]]:
    return np.sort(np.argsort(-values, axis=1, kind="stable")[:, :count], axis=1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", DECODER_ONLY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_router_asked_for_its_own_layer_foresees_its_picks(pairs: Pairs, family: str, dtype: str) -> None:
    """In the layer itself the rows are those that the router saw: weights above 1/2 are exactly its picks."""
    pair = pairs.get(family, dtype)
    source = asking(pair)
    logits(pair, pair.loaded.model, prompts(2, 12))

    for layer, spec in enumerate(pair.loaded.layers):
        (picks,) = source.picks[layer]
        values = source.answers[layer].values
        assert values.shape == (len(picks), sum(each.experts for each in pair.loaded.layers[layer:]))
        assert values.dtype == np.float32
        assert ((values >= 0) & (values <= 1)).all()
        own = values[:, : spec.experts]
        best = -np.sort(-own, axis=1)[:, : spec.top_k]  # compared by value: which of equals is picked is arbitrary
        assert (-np.sort(-np.take_along_axis(own, picks, axis=1), axis=1) == best).all()
        assert ((own > 0.5).sum(axis=1) <= spec.top_k).all()


@pytest.mark.parametrize("family", DECODER_ONLY)
@torch.inference_mode()
def test_looking_ahead_changes_nothing_and_foresees_more_than_chance(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    plain = logits(pair, pair.loaded.model, prompts(2, 12)).clone()
    source = asking(pair)
    looking = logits(pair, pair.loaded.model, prompts(2, 12))

    assert torch.equal(plain, looking)
    layers = pair.loaded.layers
    first, second = layers[0], layers[1]
    foreseen = picked(source.answers[0].values[:, first.experts : first.experts + second.experts], second.top_k)
    (picks,) = source.picks[1]
    recall = np.mean(
        [len(set(ours) & set(own)) / second.top_k for ours, own in zip(foreseen, picks.tolist(), strict=True)]
    )
    assert recall > 1.2 * second.top_k / second.experts


@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
@torch.inference_mode()
def test_rows_are_given_the_norm_of_the_layer_they_are_asked_for(pairs: Pairs, family: str) -> None:
    """What one layer's norm made of a residual becomes what another's would have made of it (RMS norm, layer norm)."""
    pair = pairs.get(family)
    asking(pair)
    ahead = pair.loaded.hooks.look_ahead
    assert isinstance(ahead, LookAhead)
    generator = torch.Generator().manual_seed(3)
    here, there = (gate.norm for gate in ahead._gates[:2])
    for norm in (here, there):
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    residual = torch.randn(5, 32, generator=generator)

    values = ahead.weights(0, 1, here(residual))

    _, picks = ahead._gates[1].outputs(there(residual))
    assert picked(values, picks.shape[1]) == torch.sort(picks, dim=1).values.tolist()
    pairs.forget(family)


@pytest.mark.parametrize("family", DECODER_ONLY)
@torch.inference_mode()
def test_maps_of_the_residual_stream_answer_in_the_routers_place_and_change_nothing(pairs: Pairs, family: str) -> None:
    """They foresee one layer ahead here: of the layer itself, and of those further on, the routers still speak."""
    pair = pairs.get(family)
    source = asking(pair)
    plain = logits(pair, pair.loaded.model, prompts(2, 12)).clone()
    by_routers = dict(source.answers)
    ahead, layers = pair.loaded.hooks.look_ahead, pair.loaded.layers
    assert isinstance(ahead, LookAhead)
    form = ResidualForm(pair.loaded.model.config.hidden_size, 0, 1, False)
    sure = [
        LayerMaps(
            None, np.zeros(0, dtype=np.float32), np.zeros((form.hidden, spec.experts), dtype=np.float16),
            np.where(np.arange(spec.experts) == 1, 9, -9).astype(np.float32),
        )
        for spec in layers[1:]
    ]  # fmt: skip
    experts = tuple(spec.experts for spec in layers)
    file = ResidualFile.of_layers(form, sure, model="", experts_per_layer=experts, sequences=1)
    ahead.use(ResidualMaps(file, dtype=torch.float32))
    mapped = logits(pair, pair.loaded.model, prompts(2, 12))

    assert torch.equal(plain, mapped)
    for layer, spec in enumerate(layers):
        before, after = by_routers[layer].values, source.answers[layer].values
        first, second = spec.experts, spec.experts + (layers[layer + 1].experts if layer + 1 < len(layers) else 0)
        assert (before[:, :first] == after[:, :first]).all()
        assert (before[:, second:] == after[:, second:]).all()
        own = after[:, first:second]
        assert own[:, 1:2].min(initial=1) > 0.99
        assert np.delete(own, [1] if second > first else [], axis=1).max(initial=0) < 0.01
    ahead.use(None)
    logits(pair, pair.loaded.model, prompts(2, 12))
    assert all((source.answers[layer].values == by_routers[layer].values).all() for layer in range(len(layers)))


def test_routers_that_can_not_be_run_ahead_are_said_once_and_left_alone(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = pairs.get("olmoe")
    router = type(pair.loaded.model.model.layers[1].mlp.gate)

    def two_outputs(self: Any, rows: torch.Tensor) -> Any:
        return rows, rows

    monkeypatch.setattr(router, "forward", two_outputs)
    with caplog.at_level(logging.WARNING):
        asking(pair)
    assert pair.loaded.hooks.look_ahead is None
    assert [record.message for record in caplog.records if "look-ahead" in record.message] == [
        "no look-ahead: the routers of olmoe can not be run ahead of their layers; the policy goes on without"
    ]


def test_nothing_is_computed_unless_it_is_asked_for(pairs: Pairs) -> None:
    assert pairs.get("olmoe").loaded.hooks.look_ahead is None
