"""Routers and blocks without their modules, against transformers' own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn
from transformers import MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock, OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.source import Arriving
from greenroom.moe.kernels.expert_hooks import LayerHook, ModelHooks, hook_of, set_hook
from greenroom.moe.kernels.expert_products import Grouped
from greenroom.moe.kernels.experts_forward import IMPLEMENTATION
from greenroom.moe.kernels.lean_block import LeanBlock, lean_block
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import Lasting, NativeRows, native_rows
from tests.examples import examples

try:
    native: NativeRows = native_rows()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

HIDDEN, INNER, EXPERTS, TOP_K = 64, 96, 8, 3
_SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
BLOCKS: dict[str, tuple[Any, Any, Any]] = {
    "mixtral": (
        MixtralSparseMoeBlock, MixtralTopKRouter,
        MixtralConfig(num_local_experts=EXPERTS, intermediate_size=INNER, **_SIZES),
    ),
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock, Qwen3MoeTopKRouter,
        Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=INNER, norm_topk_prob=True, **_SIZES),
    ),
    "olmoe": (
        OlmoeSparseMoeBlock, OlmoeTopKRouter,
        OlmoeConfig(num_experts=EXPERTS, intermediate_size=INNER, norm_topk_prob=False, **_SIZES),
    ),
}  # fmt: skip


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Holds:
    """A source that has all experts; ``together``: and says so."""

    def __init__(self, weights: list[ExpertWeights], *, together: bool) -> None:
        self._weights = weights
        self._together = together
        self._addresses = np.array([[tensor.data_ptr() for tensor in expert] for expert in weights])
        self.picked = 0
        self.allowed: NDArray[np.bool_] | None = None
        self.kept_from: list[bool] = []

    def allowed_experts(self, layer: int) -> NDArray[np.bool_] | None:
        return self.allowed

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        self.kept_from += rows.tolist()

    @contextlib.contextmanager
    def routed(self, layer: int, picks: NDArray[np.int64]) -> Iterator[Arriving]:
        wanted = np.unique(picks).tolist()
        self.picked += len(wanted)
        yield iter([(expert, self._weights[expert]) for expert in reversed(wanted)])

    def resident_addresses(self, layer: int, picks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self._addresses if self._together else None

    def layer_ran(self, layer: int, experts: int) -> None:
        self.picked += experts


def block_of(family: str, source: Any) -> Any:
    kind, _, config = BLOCKS[family]
    config._experts_implementation = IMPLEMENTATION
    block = kind(config).bfloat16().eval()
    with torch.no_grad():
        block.gate.weight.copy_(random(5, EXPERTS, HIDDEN) / 4)
    hooks = ModelHooks()
    hooks.source = source
    set_hook(block.experts, LayerHook(0, hooks, native))
    return block


def weights_of(seed: int) -> list[ExpertWeights]:
    return [(random(seed + e, 2 * INNER, HIDDEN) / 8, random(seed + 50 + e, HIDDEN, INNER) / 8) for e in range(EXPERTS)]


@pytest.mark.parametrize("family", sorted(BLOCKS))
@torch.inference_mode()
def test_a_router_picks_what_its_family_does(family: str) -> None:
    _, kind, config = BLOCKS[family]
    router = kind(config).bfloat16()
    router.weight.copy_(random(1, EXPERTS, HIDDEN) / 4)
    rows = random(2, 400, HIDDEN)
    logits, scales, picks = router(rows)
    own_picks, own_scales = native.route(
        router.weight, rows, TOP_K, normalise=family != "olmoe", rounded=family != "mixtral"
    )
    ranked = logits.float().sort(dim=1, descending=True).values
    clear = ((ranked[:, :TOP_K] - ranked[:, 1 : TOP_K + 1]) > ranked[:, :TOP_K].abs() * 2.0**-6).all(dim=1)
    assert clear.float().mean() > 0.5
    assert torch.equal(own_picks[clear], picks[clear])
    assert torch.allclose(own_scales[clear], scales[clear].float(), rtol=2.0**-6)
    assert torch.allclose(own_picks.sort(dim=1).values.diff(dim=1).clamp(max=1).float(), torch.ones(400, TOP_K - 1))


@given(st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=examples(40), deadline=None)
def test_a_row_is_routed_alike_in_any_company(count: int, seed: int) -> None:
    rows, weight = random(seed, count, HIDDEN), random(seed + 1, EXPERTS, HIDDEN)
    picks, scales = native.route(weight, rows, TOP_K, normalise=True, rounded=False)
    assert torch.allclose(scales.sum(dim=1), torch.ones(count))
    assert (scales.diff(dim=1) <= 0).all()
    for row in range(count):
        alone = native.route(weight, rows[row : row + 1], TOP_K, normalise=True, rounded=False)
        assert torch.equal(alone[0][0], picks[row])
        assert torch.equal(alone[1][0], scales[row])


def test_of_equal_experts_the_first_are_picked() -> None:
    weight = torch.ones(EXPERTS, HIDDEN).bfloat16()
    picks, scales = native.route(weight, random(0, 2, HIDDEN), TOP_K, normalise=True, rounded=False)
    assert picks.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(scales, torch.full((2, TOP_K), 1 / TOP_K))


@given(st.integers(1, 60), st.integers(0, 2**31))
@settings(max_examples=examples(40), deadline=None)
def test_all_experts_at_once_are_the_picked_ones_in_order(count: int, seed: int) -> None:
    rows, stream, weights = random(seed, count, HIDDEN), random(seed + 1, count, HIDDEN), weights_of(seed)
    picks, scales = native.route(random(seed + 2, EXPERTS, HIDDEN), rows, TOP_K, normalise=True, rounded=False)
    grouped = Grouped.of(picks.numpy(), EXPERTS)
    total = torch.zeros_like(rows)
    factors = scales.numpy().T.reshape(-1)[grouped.order]
    for expert, (_, start, end) in sorted(grouped.spans.items()):
        own = grouped.tokens[start:end], factors[start:end]
        native.experts([weights[expert]], np.array([0, end - start]), rows, *own, total, add=True)
    addresses = np.array([[up.data_ptr(), down.data_ptr()] for up, down in weights])
    expected = stream + total
    assert native.all_experts(Lasting(addresses), INNER, picks, scales, rows, stream) == len(grouped.spans)
    assert torch.equal(stream, expected)


@pytest.mark.parametrize("family", sorted(BLOCKS))
@torch.inference_mode()
def test_a_block_is_the_same_however_its_experts_come(family: str) -> None:
    rows, weights = random(3, 9, HIDDEN), weights_of(9)
    streams, picked = [], []
    for together in (True, False):
        source = Holds(weights, together=together)
        lean = lean_block(block_of(family, source), native)
        assert isinstance(lean, LeanBlock)
        stream = random(4, 9, HIDDEN)
        lean.add(rows, stream)
        streams.append(stream)
        picked.append(source.picked)
    assert torch.equal(*streams)
    assert picked[0] == picked[1] > 0
    own = random(4, 9, HIDDEN) + block_of(family, Holds(weights, together=False))(rows[None])[0]
    assert torch.allclose(streams[0].float(), own.float(), rtol=2.0**-5, atol=2.0**-5)


@torch.inference_mode()
def test_the_module_itself_runs_where_its_router_is_watched_and_where_it_must_refuse_a_mask() -> None:
    source = Holds(weights_of(9), together=True)
    block = block_of("mixtral", source)
    lean = lean_block(block, native)
    assert lean is not None
    asked: list[int] = []
    block.gate.register_forward_hook(lambda *_: asked.append(1))
    rows, stream = random(3, 2, HIDDEN), random(4, 2, HIDDEN)

    def asks(allowed: NDArray[np.bool_] | None = None) -> bool:
        asked.clear()
        source.allowed = allowed
        lean.add(rows, stream)
        return bool(asked)

    every = np.ones((2, EXPERTS), dtype=np.bool_)
    assert not asks()
    assert not asks(every)
    assert not asks(every[:1])
    assert asks(np.ones((3, EXPERTS), dtype=np.bool_))
    assert asks(every[:, 1:])
    assert asks(np.arange(EXPERTS)[None] < TOP_K - 1)
    hook_of(block.experts).masking = "its router is another"
    assert asks(every)
    lean._hook.model_hooks.on_router_logits = lambda layer, logits: None
    assert asks()


def masks(rows: int, seed: int, *, alike: bool) -> NDArray[np.bool_]:
    generator = np.random.default_rng(seed)
    allowed = np.zeros((1 if alike else rows, EXPERTS), dtype=np.bool_)
    for row in allowed:
        row[generator.permutation(EXPERTS)[: generator.integers(TOP_K, EXPERTS + 1)]] = True
    return allowed


@pytest.fixture(params=native.instruction_sets, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    native.use(request.param)
    yield request.param
    native.use(native.instruction_sets[0])


@pytest.mark.usefixtures("instruction_set")
@given(st.integers(1, 40), st.integers(0, 2**31), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_row_under_a_mask_is_routed_as_if_there_were_no_others(
    count: int, seed: int, alike: bool, normalise: bool, rounded: bool
) -> None:
    rows, weight = random(seed, count, HIDDEN), random(seed + 1, EXPERTS, HIDDEN) / 8
    allowed = masks(count, seed, alike=alike)
    rerouted = Lasting(np.empty(count, dtype=np.bool_))
    picks, scales, found = native.route_confined(
        weight, rows, TOP_K, Lasting(allowed), rerouted, normalise=normalise, rounded=rounded
    )
    assert found == np.count_nonzero(rerouted.array)
    free, _ = native.route(weight, rows, TOP_K, normalise=normalise, rounded=rounded)
    for row in range(count):
        may = allowed[0 if alike else row]
        kept = torch.from_numpy(np.flatnonzero(may))
        alone = native.route(weight[kept], rows[row : row + 1], TOP_K, normalise=normalise, rounded=rounded)
        assert torch.equal(picks[row], kept[alone[0][0]])
        assert torch.equal(scales[row], alone[1][0])
        assert rerouted.array[row] == (picks[row].tolist() != free[row].tolist())


@given(st.integers(1, 20), st.integers(0, 2**31))
@settings(max_examples=examples(30), deadline=None)
def test_a_mask_comes_before_softmax_top_k_and_normalisation(count: int, seed: int) -> None:
    """In plain torch, from the same logits."""
    rows, weight = random(seed, count, HIDDEN), random(seed + 1, EXPERTS, HIDDEN) / 8
    allowed = masks(count, seed, alike=False)
    logits = native.linear(rows, weight).float().masked_fill(torch.from_numpy(~allowed), -torch.inf)
    ranked = logits.softmax(dim=1).sort(dim=1, descending=True, stable=True)
    expected, picked = ranked.values[:, :TOP_K], ranked.indices[:, :TOP_K]
    for normalise in (False, True):
        picks, scales, _ = native.route_confined(
            weight, rows, TOP_K, Lasting(allowed), Lasting(~allowed[:, 0]), normalise=normalise, rounded=False
        )
        assert torch.equal(picks, picked)
        torch.testing.assert_close(scales, expected / expected.sum(dim=1, keepdim=True) if normalise else expected)


def test_too_few_to_pick_from_are_refused() -> None:
    weight, rows = random(1, EXPERTS, HIDDEN), random(2, 3, HIDDEN)
    allowed = np.ones((3, EXPERTS), dtype=np.bool_)
    allowed[2, TOP_K - 1 :] = False

    def found(of: NDArray[np.bool_]) -> int:
        rerouted = Lasting(np.empty(3, dtype=np.bool_))
        return native.route_confined(weight, rows, TOP_K, Lasting(of), rerouted, normalise=True, rounded=False)[2]

    assert found(allowed) == found(allowed[2:]) == -1
    assert found(allowed[:1]) == 0


@pytest.mark.parametrize("family", sorted(BLOCKS))
@pytest.mark.parametrize("alike", [False, True])
@torch.inference_mode()
def test_a_confined_block_is_its_modules_under_the_same_mask(family: str, alike: bool) -> None:
    count = 30
    rows, weights, allowed = random(3, count, HIDDEN), weights_of(9), masks(count, 4, alike=alike)
    source = Holds(weights, together=True)
    source.allowed = allowed
    block = block_of(family, source)
    lean = lean_block(block, native)
    assert isinstance(lean, LeanBlock)
    stream = torch.zeros_like(rows)
    lean.add(rows, stream)
    own = type(block.gate).forward
    logits = nn.functional.linear(rows, block.gate.weight).masked_fill(torch.from_numpy(~allowed), -torch.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda *_: logits)
        _, scales, picks = own(block.gate, rows)
    expected = block.experts(rows, picks, scales)
    ranked = logits.float().sort(dim=1, descending=True).values
    clear = (ranked[:, :TOP_K] - ranked[:, 1 : TOP_K + 1] > ranked[:, :TOP_K].abs() * 2.0**-6).all(dim=1)
    assert clear.float().mean() > 0.5
    assert torch.allclose(stream[clear].float(), expected[clear].float(), rtol=2.0**-5, atol=2.0**-5)
    assert len(source.kept_from) == count
    assert 0 < sum(source.kept_from) < count


def test_near_ties_of_many_experts_do_not_hide_a_router() -> None:
    """128 experts, eight a row: in half of all rows two of the picked have the same logit."""
    config = Qwen3MoeConfig(
        num_experts=128, num_experts_per_tok=8, hidden_size=HIDDEN, moe_intermediate_size=INNER, norm_topk_prob=True
    )
    block = Qwen3MoeSparseMoeBlock(config).bfloat16().eval()
    for seed in range(5):
        with torch.no_grad():
            block.gate.weight.copy_(random(seed, 128, HIDDEN) / 8)
        set_hook(block.experts, LayerHook(0, ModelHooks(), native))
        assert lean_block(block, native) is not None


class _Scaled(MixtralSparseMoeBlock):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(hidden_states) * 2
        return out


class _ByBias(MixtralTopKRouter):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor) -> Any:
        logits, scales, picks = super().forward(hidden_states)
        return logits, scales, picks.flip(1)


def test_what_computes_otherwise_is_left_to_its_modules() -> None:
    source = Holds(weights_of(9), together=True)
    scaled, shared = block_of("mixtral", source), block_of("mixtral", source)
    scaled.__class__ = _Scaled
    assert lean_block(scaled, native) is None
    shared.extra = nn.Linear(4, 4)
    assert lean_block(shared, native) is None
    other = block_of("mixtral", source)
    other.gate.__class__ = _ByBias
    assert lean_block(other, native) is None
