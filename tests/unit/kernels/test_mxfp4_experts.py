"""Compiled products of experts in MXFP4 are those of the same experts in bf16, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.moe.native.rows import ClampedGate
from tests.examples import examples
from tests.unit.kernels.instruction_sets import instruction_set as instruction_set
from tests.unit.kernels.instruction_sets import native, random
from tests.unit.kernels.mxfp4_weights import CodedExpert, coded_expert

GATE = ClampedGate(alpha=1.702, limit=7.0)
ALL_SCALES = 0, 252
"""With which every code is a number of bf16."""

widths = st.integers(1, 5).map(lambda blocks: 32 * blocks)


def both(experts: list[CodedExpert], starts: list[int], rows: torch.Tensor, *, add: bool = False, seed: int = 0) -> Any:
    """The results of the codes, and of the expanded weights."""
    count = starts[-1]
    generator = np.random.default_rng(seed)
    tokens, scales = generator.integers(0, len(rows), count), generator.random(count, dtype=np.float32)
    found = []
    for products, weights in (
        (native.mxfp4_experts, [expert.record for expert in experts]),
        (native.clamped_experts, [expert.expanded for expert in experts]),
    ):
        out = random(seed, len(rows) if add else count, rows.shape[1])
        products(GATE, weights, np.array(starts), rows, tokens, scales, out, add=add)
        found.append(out)
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN in the same places, and everything else to the bit: zeros have signs."""
    numbers = ~one.isnan()
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one[numbers].view(torch.int16), other[numbers].view(torch.int16)
    )


@given(
    st.integers(1, 40),
    widths,
    widths,
    st.sampled_from([(118, 126), (0, 8), (100, 140), ALL_SCALES]),
    st.integers(0, 2**31),
)
@settings(max_examples=examples(60), deadline=None)
def test_products_are_those_of_the_expanded_weights(
    count: int, hidden: int, inner: int, scales: tuple[int, int], seed: int
) -> None:
    coded, expanded = both([coded_expert(seed, hidden, inner, scales)], [0, count], random(seed, count, hidden))
    assert same_bits(coded, expanded)
    assert scales != (118, 126) or bool(coded.isfinite().all()), "there is something to compare"


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 12, 13, 31, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 96), (64, 608)])
def test_of_long_and_of_wide_matrices(rows: int, hidden: int, inner: int) -> None:
    """Of which the inputs are several blocks, and the outputs several strips."""
    coded, expanded = both([coded_expert(3, hidden, inner)], [0, rows], random(4, rows, hidden))
    assert same_bits(coded, expanded)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(20), deadline=None)
def test_of_several_experts(counts: list[int], add: bool, seed: int) -> None:
    experts = [coded_expert(seed + number, 64, 32) for number in range(len(counts))]
    starts = [0, *np.cumsum(counts).tolist()]
    coded, expanded = both(experts, starts, random(seed, max(counts), 64), add=add, seed=seed)
    assert same_bits(coded, expanded)


def test_threads_change_nothing() -> None:
    expert, rows = coded_expert(5, 1024, 320), random(6, 14, 1024)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(both([expert], [0, 14], rows)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("rows", [1, 6])
def test_numbers_that_are_none_stay_where_they_are(bad: float, rows: int) -> None:
    x = random(7, rows, 64)
    x[0, 5] = bad
    coded, expanded = both([coded_expert(8, 64, 64)], [0, rows], x)
    assert same_bits(coded, expanded)
