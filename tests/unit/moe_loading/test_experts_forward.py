"""Against transformers' own eager loop, on experts modules of every kind that its interface describes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AriaTextConfig, GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.kernels.expert_hooks import LayerHook, ModelHooks, set_hook
from greenroom.moe.kernels.expert_products import Grouped, TorchSum
from greenroom.moe.kernels.experts_forward import IMPLEMENTATION, combine
from tests.contract.families.sources import ScriptedExperts
from tests.examples import examples
from tests.random_checkpoints import randomise

EXPERTS = 6
HIDDEN = 32


def muse_spark_config() -> Any:
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig

    return MuseSparkTextConfig(moe_hidden_size=HIDDEN, moe_intermediate_size=24, num_local_experts=EXPERTS)


KINDS: dict[str, tuple[Any, Any]] = {
    "plain": (
        MixtralExperts,
        lambda: MixtralConfig(hidden_size=HIDDEN, intermediate_size=24, num_local_experts=EXPERTS),
    ),
    "transposed, biased, interleaved": (
        GptOssExperts,
        lambda: GptOssConfig(hidden_size=HIDDEN, intermediate_size=24, num_local_experts=EXPERTS),
    ),
    "transposed": (
        AriaExperts,
        lambda: AriaTextConfig(hidden_size=HIDDEN, intermediate_size=24, moe_num_experts=EXPERTS),
    ),
    "without gate": (
        NemotronHExperts,
        lambda: NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=24, n_routed_experts=EXPERTS),
    ),
    "normalised behind": (MuseSparkExperts, muse_spark_config),
}


class Case:
    """An experts module as transformers runs it, and the same without its weights, hooked."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        module_class, config = KINDS[kind]
        self.eager = module_class(config()).to(dtype).eval()
        randomise(self.eager, seed=0)
        self.eager.config._experts_implementation = "eager"
        self.hooked = copy.deepcopy(self.eager)
        self.hooked.config._experts_implementation = IMPLEMENTATION
        names = ["gate_up_proj" if self.eager.has_gate else "up_proj", "down_proj"]
        if self.eager.has_bias:
            names = [part for name in names for part in (name, f"{name}_bias")]
        stacked = [self.hooked._parameters.pop(name) for name in names]
        self.source = ScriptedExperts([[tuple(p[e].detach().clone() for p in stacked) for e in range(EXPERTS)]])
        hooks = ModelHooks()
        hooks.source = self.source
        set_hook(self.hooked, LayerHook(0, hooks))


def routing(rows: int, k: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    picks = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(rows)])
    weights = torch.rand(rows, k, generator=generator)
    return hidden, picks, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide_weights", [False, True], ids=["weights as hidden", "float32 weights"])
@torch.inference_mode()
def test_equal_to_the_bit(kind: str, dtype: torch.dtype, wide_weights: bool) -> None:
    case = Case(kind, dtype)
    for seed, (rows, k) in enumerate([(1, 1), (1, 4), (2, 2), (7, 3), (33, 6)]):
        hidden, picks, weights = routing(rows, k, seed, dtype)
        weights = weights if wide_weights else weights.to(dtype)
        case.source.order = random.Random(seed)
        result = case.hooked(hidden, picks, weights)
        expected = case.eager(hidden, picks, weights)
        assert result.dtype == expected.dtype
        if kind == "without gate" and wide_weights:  # NemotronH alone adds up in the weights' dtype
            torch.testing.assert_close(result, expected, rtol=0, atol=0.01 * expected.abs().max().item())
        else:
            assert torch.equal(result, expected)
        assert expected.abs().sum() > 0


@torch.inference_mode()
def test_what_is_no_pick_adds_nothing() -> None:
    case = Case("plain", torch.float32)
    hidden, picks, weights = routing(5, 3, 0, torch.float32)
    picks[1, 0] = EXPERTS
    picks[2] = EXPERTS
    picks[3, 2] = EXPERTS + 7
    result = case.hooked(hidden, picks, weights)
    assert torch.equal(result, case.eager(hidden, picks.clamp(max=EXPERTS), weights))
    assert torch.equal(result[2], torch.zeros(HIDDEN))
    no_picks = torch.full_like(picks, EXPERTS)
    assert torch.equal(case.hooked(hidden, no_picks, weights), torch.zeros(5, HIDDEN))


@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 2**32),
    st.permutations(range(EXPERTS)),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_order_adds_up_to_the_same(rows: int, k: int, seed: int, order: list[int], dtype: torch.dtype) -> None:
    hidden, picks, weights = routing(rows, k, seed, dtype)
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    reference = torch.zeros_like(hidden)
    for expert in range(EXPERTS):
        slot, token = torch.where(picks.T.eq(expert))
        reference.index_add_(0, token, ((hidden[token] @ experts[expert]) * weights[token, slot, None]).to(dtype))

    def arriving() -> Iterator[tuple[int, ExpertWeights]]:
        for expert in order:
            if (picks == expert).any():
                yield expert, (experts[expert],)

    grouped = Grouped.of(picks.numpy(), EXPERTS)
    result = combine(grouped, arriving(), TorchSum(hidden, weights, grouped, lambda rows, held: rows @ held[0]))
    assert torch.equal(result, reference)


def test_a_source_that_leaves_experts_out_is_a_defect() -> None:
    hidden, picks, weights = routing(4, 2, 0, torch.float32)
    grouped = Grouped.of(np.tile([0, 1], (4, 1)), EXPERTS)
    total = TorchSum(hidden, weights, grouped, lambda rows, _: rows)
    with pytest.raises(RuntimeError, match=r"left out the experts \[0, 1"):
        combine(grouped, iter(()), total)
    assert picks.shape == (4, 2)


def test_a_model_without_a_source_says_so() -> None:
    case = Case("plain", torch.float32)
    set_hook(case.hooked, LayerHook(0, ModelHooks()))
    with pytest.raises(RuntimeError, match="attach a source"):
        case.hooked(*routing(2, 2, 0, torch.float32))


def test_a_module_that_was_not_loaded_here_says_so() -> None:
    module = MixtralExperts(KINDS["plain"][1]())
    module.config._experts_implementation = IMPLEMENTATION
    with pytest.raises(RuntimeError, match="was not loaded by greenroom"):
        module(*routing(2, 2, 0, torch.float32))
