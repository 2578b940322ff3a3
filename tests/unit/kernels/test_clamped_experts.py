"""gpt-oss's experts by the compiled products: beside transformers' eager ones, and what a row's result depends on."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.kernels.expert_products import clamped_gate_of
from greenroom.moe.native.rows import ClampedGate
from tests.examples import examples
from tests.unit.kernels.instruction_sets import instruction_set as instruction_set
from tests.unit.kernels.instruction_sets import native, random

GATE = ClampedGate(alpha=1.702, limit=7.0)


def weights_of(seed: int, hidden: int, inner: int) -> ExpertWeights:
    """Gates and ups of a few units, so that the clamp takes some of them."""
    up = random(seed, hidden, 2 * inner) * (3 / hidden**0.5)
    return up, random(seed + 1, 2 * inner), random(seed + 2, inner, hidden), random(seed + 3, hidden)


def run(
    weights: ExpertWeights, rows: torch.Tensor, tokens: list[int], scales: list[float], gate: ClampedGate = GATE
) -> torch.Tensor:
    """Each of the ``tokens`` through one expert, one result after another."""
    where, by = np.array(tokens, dtype=np.int64), np.array(scales, dtype=np.float32)
    out = torch.full((len(tokens), rows.shape[1]), 9.0).bfloat16()
    native.clamped_experts(gate, [weights], np.array([0, len(tokens)]), rows, where, by, out, add=False)
    return out


def eager_experts(weights: ExpertWeights, gate: ClampedGate = GATE) -> GptOssExperts:
    """transformers' module, of one expert."""
    hidden, inner = weights[0].shape[0], weights[2].shape[0]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_local_experts": 1, "num_experts_per_tok": 1}
    experts = GptOssExperts(GptOssConfig(**sizes)).bfloat16()
    experts.config._experts_implementation = "eager"
    experts.alpha, experts.limit = gate
    parts = experts.gate_up_proj, experts.gate_up_proj_bias, experts.down_proj, experts.down_proj_bias
    for parameter, tensor in zip(parts, weights, strict=True):
        parameter.data = tensor[None].clone()
    return experts


@torch.inference_mode()
def eager(weights: ExpertWeights, rows: torch.Tensor, gate: ClampedGate = GATE) -> torch.Tensor:
    count = len(rows)
    picks, scales = torch.zeros(count, 1, dtype=torch.int64), torch.ones(count, 1).bfloat16()
    found: torch.Tensor = eager_experts(weights, gate)(rows, picks, scales)
    return found


@given(
    st.integers(1, 30), st.integers(1, 90).map(lambda n: 2 * n), st.integers(1, 80).map(lambda n: 2 * n),
    st.sampled_from([GATE, ClampedGate(1.0, 2.5)]), st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(60), deadline=None)
def test_an_expert_is_transformers_eager_one_but_for_the_last_bits(
    count: int, hidden: int, inner: int, gate: ClampedGate, seed: int
) -> None:
    weights, rows = weights_of(seed, hidden, inner), random(seed + 9, count, hidden)
    got, expected = run(weights, rows, list(range(count)), [1.0] * count, gate), eager(weights, rows, gate)
    # What rounding can be amplified by: the sizes of what is added up in the second projection.
    between = eager_experts(weights, gate)._apply_gate(rows.float() @ weights[0].float() + weights[1].float())
    inside = between.abs() @ weights[2].float().abs() + weights[3].float().abs()
    assert ((got.float() - expected.float()).abs() <= inside * 2.0**-6 + 1e-6).all()


@torch.inference_mode()
def test_nearly_all_results_are_eagers_to_the_bit() -> None:
    """Every rounding of eager's is there: sums alone differ."""
    weights, rows = weights_of(1, 128, 96), random(2, 64, 128)
    equal = run(weights, rows, list(range(64)), [1.0] * 64) == eager(weights, rows)
    assert equal.float().mean() > 0.97


def test_routing_weights_scale_rounded_results() -> None:
    weights, rows = weights_of(0, 34, 22), random(9, 4, 34)
    tokens, scales = [3, 1, 1], [0.25, 0.7, 1.5]
    plain = run(weights, rows, tokens, [1.0] * 3)
    assert torch.equal(run(weights, rows, tokens, scales), (plain.float() * torch.tensor(scales)[:, None]).bfloat16())


@pytest.mark.parametrize("rows", [2, 5, 12, 13, 31, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(1030, 46), (40, 602)])
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: int, hidden: int, inner: int) -> None:
    """Long rows are several blocks, wide ones several strips, and some widths are no whole tiles."""
    weights, x = weights_of(3, hidden, inner), random(4, rows, hidden)
    together = run(weights, x, list(range(rows))[::-1], [0.5] * rows)
    for row in range(rows):
        assert torch.equal(run(weights, x, [row], [0.5])[0], together[rows - 1 - row])


def test_threads_change_nothing() -> None:
    weights, x = weights_of(5, 1024, 310), random(6, 14, 1024)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(weights, x, list(range(14)), [1.0] * 14))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@given(st.lists(st.integers(1, 25), min_size=1, max_size=5), st.integers(0, 2**31), st.booleans())
@settings(max_examples=examples(30), deadline=None)
def test_experts_together_are_one_after_another(counts: list[int], seed: int, add: bool) -> None:
    hidden, inner, total = 34, 54, sum(counts)
    generator = torch.Generator().manual_seed(seed)
    rows = random(seed, total, hidden)
    weights = [weights_of(seed + 10 * e, hidden, inner) for e in range(len(counts))]
    tokens = torch.randint(total, (total,), generator=generator).numpy()
    scales = torch.rand(total, generator=generator).numpy()
    starts = np.cumsum([0, *counts])
    apart, together = (random(seed, total, hidden) for _ in range(2))
    native.clamped_experts(GATE, weights, starts, rows, tokens, scales, together, add=add)
    for number, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
        into, own = apart if add else apart[start:end], np.array([0, end - start])
        alone = weights[number : number + 1]
        native.clamped_experts(GATE, alone, own, rows, tokens[start:end], scales[start:end], into, add=add)
    assert torch.equal(together, apart)


def test_gates_saturate_and_nan_stays() -> None:
    """With weights of one, so that gate and up are the row's numbers."""
    up = torch.eye(2).repeat_interleave(2, dim=1).bfloat16()
    weights = up, torch.zeros(4).bfloat16(), torch.eye(2).bfloat16(), torch.zeros(2).bfloat16()
    numbers = [300.0, -300.0, 7.0, -7.0, 7.03125, -7.03125, 1e30, -1e30, 0.0, -0.0, 2.5, -50.0]
    rows = torch.tensor(numbers).bfloat16().view(-1, 2)
    assert torch.equal(run(weights, rows, list(range(len(rows))), [1.0] * len(rows)), eager(weights, rows))
    for bad in (float("nan"), float("inf"), -float("inf")):
        # The other number's product with its weight of 0 is no number either.
        row = torch.tensor([[bad, 1.0]]).bfloat16()
        got, expected = run(weights, row, [0], [1.0]), eager(weights, row)
        assert torch.equal(got.isnan(), expected.isnan())
        assert got.isnan().any()


@pytest.mark.parametrize(
    ("gate", "up"), [(torch.inf, 1.0), (1.0, torch.inf), (1.0, -torch.inf), (torch.nan, 1.0), (1.0, torch.nan)]
)
def test_infinite_numbers_are_clamped_and_nan_is_not(gate: float, up: float) -> None:
    """By the biases, so that no infinity is multiplied by 0. One neuron twice, since an inner width is even."""
    bias = torch.tensor([gate, up]).repeat(2).bfloat16()
    weights = torch.zeros(2, 4).bfloat16(), bias, torch.full((2, 2), 0.5).bfloat16(), torch.zeros(2).bfloat16()
    rows = torch.ones(1, 2).bfloat16()
    got, expected = run(weights, rows, [0], [1.0]), eager(weights, rows)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert bool(got.isnan().any()) == (gate != gate or up != up)


def test_the_gate_is_the_modules_own() -> None:
    made = eager_experts(weights_of(0, 32, 24), ClampedGate(1.5, 6.0))
    assert clamped_gate_of(made) == ClampedGate(1.5, 6.0)
    made.intermediate_size = 23
    assert clamped_gate_of(made) is None
