"""Routers under a mask pick what they would pick if the forbidden experts did not exist."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenroom.core.errors import UnsupportedModel
from greenroom.moe.loading import load_model
from greenroom.moe.loading.load_model import attach
from greenroom.moe.routing.routers import MaskRefused, find_router
from tests.contract.families.pairs import Pair, Pairs, logits, prompts
from tests.contract.families.sources import random_masks
from tests.random_checkpoints import FAMILIES

MASKABLE = [name for name in FAMILIES if name != "deepseek_v3"]
ROWS = 24


def router_of(pair: Pair, layer: int = 0) -> tuple[Any, int]:
    found = find_router(pair.loaded.model, pair.loaded.layers[layer])
    assert found is not None
    return found


def without_forbidden(router: Any, allowed: NDArray[np.bool_]) -> Any:
    """A router of the same class that has the allowed experts only: rows of its weights are cut out."""
    kept = torch.from_numpy(np.flatnonzero(allowed))
    small = copy.deepcopy(router)
    small.__dict__.pop("forward", None)
    small.num_experts = len(kept)
    holder = getattr(small, "classifier", small)
    for name, parameter in list(holder.named_parameters(recurse=False)):
        setattr(holder, name, torch.nn.Parameter(parameter[kept].detach().clone()))
    return small


def picked(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Picks and their weights, each ``[T, k]``, best first, of either kind of router."""
    first, second, third = outputs
    if first.dtype == torch.int64:  # switch: one-hot of one pick, its probability, logits
        return first.flatten(0, 1).argmax(-1, keepdim=True), second.flatten(0, 1)
    order = second.argsort(dim=-1, descending=True, stable=True)
    return third.gather(1, order), second.gather(1, order)


def hidden(pair: Pair, seed: int = 0) -> torch.Tensor:
    """Rows for a router; for switch a batch of them, one each, so that none is beyond an expert's capacity."""
    rows = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(seed))
    return rows if pair.loaded.decoder_only else rows[:, None]


@pytest.mark.parametrize("family", MASKABLE)
@torch.inference_mode()
def test_picks_are_those_of_a_router_without_the_forbidden(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    router, _ = router_of(pair)
    layer = pair.loaded.layers[0]
    allowed = random_masks(ROWS, layer.experts, layer.top_k)
    pair.source.masks = {0: allowed}
    rows = hidden(pair)
    picks, weights = picked(router(rows))
    changed = 0
    pair.source.masks = {}
    free, _ = picked(router(rows))
    for row in range(ROWS):
        expected_picks, expected_weights = picked(without_forbidden(router, allowed[row])(rows[row : row + 1]))
        kept = torch.from_numpy(np.flatnonzero(allowed[row]))
        assert torch.equal(picks[row], kept[expected_picks[0]])
        torch.testing.assert_close(weights[row], expected_weights[0], rtol=1e-5, atol=1e-7)
        changed += not torch.equal(picks[row], free[row])
    assert changed > ROWS // 4, "masks that change nothing prove nothing"


@pytest.mark.parametrize("family", MASKABLE)
def test_a_whole_model_keeps_to_its_masks(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    ids = prompts(2, 7)
    for number, layer in enumerate(pair.loaded.layers):
        pair.source.masks[number] = random_masks(14, layer.experts, layer.top_k, seed=number)
    masked = logits(pair, pair.loaded.model, ids)
    assert torch.isfinite(masked).all()
    assert not torch.equal(masked, logits(pair, pair.eager, ids))
    for number, layer in enumerate(pair.loaded.layers):
        (picks,) = pair.source.picks[number]
        for row, row_picks in enumerate(picks):
            ran = row_picks[row_picks < layer.experts]
            assert pair.source.masks[number][row, ran].all()


@pytest.mark.parametrize("family", MASKABLE)
def test_one_mask_for_all_rows_is_it_for_each(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    ids = prompts(2, 7)
    masks = {n: random_masks(1, layer.experts, layer.top_k, seed=n) for n, layer in enumerate(pair.loaded.layers)}
    pair.source.masks = masks
    alike = logits(pair, pair.loaded.model, ids)
    pair.source.masks = {n: np.repeat(mask, 14, axis=0) for n, mask in masks.items()}
    assert torch.equal(alike, logits(pair, pair.loaded.model, ids))
    assert not torch.equal(alike, logits(pair, pair.eager, ids))


@pytest.mark.parametrize("family", MASKABLE)
@torch.inference_mode()
def test_whose_routing_was_changed_is_told(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family)
    router, _ = router_of(pair)
    layer = pair.loaded.layers[0]
    allowed = random_masks(ROWS, layer.experts, layer.top_k)
    rows = hidden(pair)
    free, _ = picked(router(rows))
    pair.source.masks = {0: allowed}
    confined, _ = picked(router(rows))
    others = [set(confined[row].tolist()) != set(free[row].tolist()) for row in range(ROWS)]
    assert pair.source.elsewhere[0].tolist() == others
    assert 0 < sum(others) < ROWS


@pytest.mark.parametrize("family", MASKABLE)
def test_a_mask_that_allows_all_changes_nothing(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family, "bfloat16")
    ids = prompts(2, 7)
    pair.source.masks = {n: np.ones((14, x.experts), dtype=bool) for n, x in enumerate(pair.loaded.layers)}
    assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))
    assert not any(rows.any() for rows in pair.source.elsewhere.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_come_out_before_the_mask(pairs: Pairs, family: str) -> None:
    pair = pairs.get(family, "bfloat16")
    ids = prompts(2, 7)
    expected: dict[int, torch.Tensor] = {}
    for number, layer in enumerate(pair.loaded.layers):
        found = find_router(pair.eager, layer)
        assert found is not None
        found[0].register_forward_hook(
            lambda _, __, outputs, n=number, i=found[1]: expected.__setitem__(n, outputs[i].flatten(0, -2).clone())
        )
    seen: dict[int, torch.Tensor] = {}
    attach(pair.loaded, pair.source, lambda layer, values: seen.__setitem__(layer, values.clone()))
    logits(pair, pair.eager, ids)
    logits(pair, pair.loaded.model, ids)
    assert seen.keys() == expected.keys() == set(range(FAMILIES[family].moe_layers))
    for number, values in seen.items():
        assert torch.equal(values, expected[number])
    if family in MASKABLE:
        layer = pair.loaded.layers[0]
        pair.source.masks = {0: random_masks(14, layer.experts, layer.top_k)}
        logits(pair, pair.loaded.model, ids)
        assert seen[0].dtype == expected[0].dtype
        assert torch.equal(seen[0], expected[0])


def test_a_pick_without_weight_is_no_pick(pairs: Pairs) -> None:
    """An allowed expert so unlikely that its probability is 0 ties with the forbidden: neither is to run."""
    pair = pairs.get("mixtral")
    router, _ = router_of(pair)
    kept = router.weight.detach().clone()
    rows = torch.ones(1, 32)
    try:
        router.weight.data.zero_()
        router.weight.data[3] = 20.0  # logit 640, all others 0: their probabilities are exactly 0 in float32
        pair.source.masks = {0: np.isin(np.arange(8), [3, 5])[None]}
        with torch.inference_mode():
            _, weights, picks = router(rows)
    finally:
        router.weight.data.copy_(kept)
    assert sorted(picks[0].tolist()) == [3, 8]
    assert sorted(weights[0].tolist()) == [0.0, 1.0]


def test_routers_that_are_not_found_can_not_be_masked(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy must know it before it counts on its masks, since they would never be asked for."""
    monkeypatch.setattr(load_model, "find_router", lambda *_: None)
    loaded = load_model.load(pairs.get("mixtral").checkpoint)
    assert loaded.masking is not None
    assert "not where" in loaded.masking


def test_too_few_allowed_is_refused(pairs: Pairs) -> None:
    pair = pairs.get("qwen2_moe")
    allowed = np.ones((14, 8), dtype=bool)
    allowed[5, 2:] = False
    pair.source.masks = {1: allowed}
    with pytest.raises(MaskRefused, match=r"2 experts of model\.layers\.2\.mlp\.experts, fewer than its top-3"):
        logits(pair, pair.loaded.model, prompts(2, 7))


@pytest.mark.parametrize("shape", [(13, 8), (14, 7), (14,)])
def test_a_mask_of_another_shape_is_refused(pairs: Pairs, shape: tuple[int, ...]) -> None:
    pair = pairs.get("mixtral")
    pair.source.masks = {0: np.ones(shape, dtype=bool)}
    with pytest.raises(MaskRefused, match=r"rows|shape"):
        logits(pair, pair.loaded.model, prompts(2, 7))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    ],
)
def test_group_limited_routers_are_never_masked(pairs: Pairs, family: str, changes: dict[str, Any]) -> None:
    pair = pairs.get(family, **changes)
    ids = prompts(2, 7)
    assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))
    assert pair.loaded.masking is not None
    assert "group" in pair.loaded.masking
    pair.source.masks = {0: np.ones((14, 8), dtype=bool)}
    with pytest.raises(UnsupportedModel, match=r"can not be confined to some experts: .*group"):
        logits(pair, pair.loaded.model, ids)


def test_why_group_limited_routers_are_never_masked(pairs: Pairs) -> None:
    """Were deepseek_v3's logits masked as the others' are, forbidden experts would still be picked."""
    pair = pairs.get("deepseek_v3")
    router, _ = router_of(pair)
    allowed = random_masks(ROWS, 8, 2)
    with torch.inference_mode():
        router.__dict__.pop("forward")
        original = torch.nn.functional.linear
        forbidden = torch.from_numpy(~allowed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch.nn.functional, "linear", lambda *a, **k: original(*a, **k).masked_fill(forbidden, -torch.inf)
            )
            _, _, picks = router(hidden(pair))
    assert forbidden.gather(1, picks).any()
    pairs.forget("deepseek_v3")
