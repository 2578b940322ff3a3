"""What holds of each kind on each backbone, before anything was learnt."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L
from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.config import BACKBONES
from greenroom.predictor.kinds.emoe.config import EMOE_KINDS
from greenroom.predictor.kinds.emoe.networks import ExpertNetwork, LearnedPredictor, by_slot
from tests.unit.predictor.kinds.emoe.untrained import EXPERTS, LAYERS, untrained


@pytest.fixture(params=BACKBONES)
def backbone(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def shares(count: int, seed: int = 1) -> torch.Tensor:
    drawn = np.random.default_rng(seed).dirichlet(np.ones(EXPERTS), (count, LAYERS))
    return torch.from_numpy(drawn.astype(np.float32))


@pytest.mark.parametrize("kind", EMOE_KINDS)
def test_a_forecast_is_a_distribution(kind: str, backbone: str) -> None:
    predictor = LearnedPredictor(untrained(kind, backbone))
    for task in ("a", "never seen"):
        for previous in (None, shares(1)[0].numpy()):
            forecast = predictor.forecast(task, previous)
            assert forecast.shape == (LAYERS, EXPERTS)
            assert forecast.dtype == np.float32
            np.testing.assert_allclose(forecast.sum(axis=1), 1, rtol=1e-5)
            assert (forecast >= 0).all()


@pytest.mark.parametrize("kind", EMOE_KINDS)
def test_it_starts_as_what_is_usual(kind: str, backbone: str) -> None:
    artifact = untrained(kind, backbone, astir=False)
    found = LearnedPredictor(artifact).forecasts(["a", "b"], shares(2).numpy())
    np.testing.assert_allclose(found, artifact.priors.by_slot[1:], rtol=1e-4)


def test_all_layers_follow_from_all_layers_of_the_previous_prompt(backbone: str) -> None:
    """GPT-2 is causal: a layer sees those before it."""
    predictor = LearnedPredictor(untrained(EMOE_A, backbone))
    one = shares(1)[0].numpy()
    for changed in range(LAYERS):
        other = one.copy()
        other[changed] = np.roll(other[changed], 1)
        moved = np.abs(predictor.forecast("a", one) - predictor.forecast("a", other)).max(axis=1) > 1e-6
        seen = range(changed, LAYERS) if backbone == "gpt2" else range(LAYERS)
        assert [layer for layer in range(LAYERS) if moved[layer]] == list(seen)


def test_layer_by_layer_only_the_first_layer_of_the_previous_prompt_is_seen(backbone: str) -> None:
    predictor = LearnedPredictor(untrained(EMOE_L, backbone))
    one, other = shares(2).numpy()
    mixed = other.copy()
    mixed[0] = one[0]
    np.testing.assert_array_equal(predictor.forecast("a", one), predictor.forecast("a", mixed))
    assert (np.abs(predictor.forecast("a", one) - predictor.forecast("a", other)).max(axis=1) > 1e-6).all()


def test_layer_by_layer_no_layer_sees_a_later_one(backbone: str) -> None:
    artifact = untrained(EMOE_L, backbone)
    network = ExpertNetwork(artifact.architecture).eval()
    network.load_state_dict({name: torch.from_numpy(one) for name, one in artifact.weights.items()})
    prior = torch.from_numpy(artifact.priors.by_slot[1:2])
    slots, usual = torch.from_numpy(artifact.priors.slots), shares(1, seed=9)
    given = shares(1)
    with torch.inference_mode():
        before = network(given, usual, prior, slots, torch.tensor([1]))
        given = given.clone()
        given[:, 2] = given[:, 2].roll(1, dims=-1)
        after = network(given, usual, prior, slots, torch.tensor([1]))
    torch.testing.assert_close(before[:, :2], after[:, :2])
    assert (before[:, 2] - after[:, 2]).abs().max() > 1e-6
    assert (before[:, 3] - after[:, 3]).abs().max() > 1e-6


def test_layer_by_layer_each_follows_from_what_was_predicted_before(backbone: str) -> None:
    """The chain, one step at a time by hand."""
    artifact = untrained(EMOE_L, backbone)
    network = ExpertNetwork(artifact.architecture).eval()
    network.load_state_dict({name: torch.from_numpy(one) for name, one in artifact.weights.items()})
    priors = artifact.priors
    prior, slots = torch.from_numpy(priors.by_slot[2:3]), torch.from_numpy(priors.slots)
    usual, previous, task = torch.from_numpy(priors.by_layer[0]), shares(1), torch.tensor([2])
    with torch.inference_mode():
        chained = by_slot(network, previous, usual, prior, slots, task)
        told = torch.cat([previous[:, :1], (chained * slots[None, :, :, None]).sum(dim=2)[:, :-1]], dim=1)
        at_once = network(told, usual[None], prior, slots, task).softmax(dim=-1)
    torch.testing.assert_close(chained, at_once, rtol=1e-4, atol=1e-5)


def test_weights_of_another_shape_are_damaged(backbone: str) -> None:
    artifact = untrained(EMOE_A, backbone)
    wider = dataclasses.replace(artifact.architecture, width=24)
    with pytest.raises(Damaged, match="not those of its architecture"):
        LearnedPredictor(dataclasses.replace(artifact, architecture=wider))
    broken = {name: np.full_like(one, np.nan) for name, one in artifact.weights.items()}
    with pytest.raises(Damaged, match="not all numbers"):
        LearnedPredictor(dataclasses.replace(artifact, weights=broken))
