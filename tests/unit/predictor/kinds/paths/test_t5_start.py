"""What the network knows before it has learnt: what was counted of each token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_forms.t5 import T5Shape
from greenroom.predictor.kinds.paths.t5 import T5PathNetwork
from greenroom.predictor.kinds.paths.t5_start import counted_start

COUNT = np.array([0, 0, 30, 1, 400, 0, 9])
"""Rows of the embedding: filler, unknown, five tokens."""


def picked(experts: int) -> NDArray[np.float32]:
    random = np.random.default_rng(0)
    found: NDArray[np.float32] = random.binomial(COUNT[:, None], random.random((len(COUNT), experts))).astype(
        np.float32
    )
    return found


def logit(chance: NDArray[np.floating]) -> NDArray[np.floating]:
    found: NDArray[np.floating] = np.log(chance / (1 - chance))
    return found


def test_each_token_begins_with_what_it_picked_and_an_unseen_one_like_all() -> None:
    picks = picked(5)
    start = counted_start(COUNT, picks.copy(), 12, 4.0, np.random.default_rng(1))
    usual = picks.sum(axis=0) / COUNT.sum()
    expected = logit((picks + 4 * usual) / (COUNT + 4.0)[:, None])
    np.testing.assert_allclose(start.embedding @ start.head.T + start.bias, expected, atol=1e-3)
    np.testing.assert_allclose((start.embedding**2).mean(axis=1), 1, rtol=1e-4)
    np.testing.assert_allclose(expected[[0, 1, 5]], np.tile(logit(usual), (3, 1)), rtol=1e-4)


def test_the_network_says_so_before_it_has_learnt() -> None:
    start = counted_start(COUNT, picked(5), 12, 4.0, np.random.default_rng(1))
    shape = T5Shape(width=12, inner=8, heads=2, key=4, encoder_layers=1, decoder_layers=2, window=3, prompt=4)
    network = T5PathNetwork(shape, len(COUNT) - 2, 5, dropout=0.1)
    network.begin_with(start)
    network.eval()
    tokens = torch.tensor([[2, 4, 6, 1]])
    with torch.inference_mode():
        found = network(torch.tensor([[3]]), tokens)[0].numpy()
    np.testing.assert_allclose(found, start.embedding[tokens[0]] @ start.head.T + start.bias, atol=1e-3)


@pytest.mark.parametrize(("experts", "width"), [(3, 12), (40, 4), (5, 2)])
def test_where_dimensions_do_not_suffice_the_ones_that_say_most_are_kept(experts: int, width: int) -> None:
    picks = picked(experts)
    usual = np.clip(picks.sum(axis=0) / COUNT.sum(), 1e-4, 1 - 1e-4)
    chance = (picks + 4 * usual) / (COUNT + 4.0)[:, None]
    unlike = (logit(np.clip(chance, 1e-4, 1 - 1e-4)) - logit(usual)) * np.sqrt(COUNT)[:, None]
    least = (np.linalg.svd(unlike, compute_uv=False)[width - 1 :] ** 2).sum()
    start = counted_start(COUNT, picks.copy(), width, 4.0, np.random.default_rng(1))
    left = unlike - (start.embedding @ start.head.T) * np.sqrt(COUNT)[:, None]
    assert (left**2).sum() <= 1.02 * least + 1e-3
    assert start.head.shape == (experts, width)
