"""Compiled products of experts in codes that share scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.moe.formats.grouped_format import GroupedFormat
from greenroom.moe.formats.registry import FORMATS
from tests.matrices import matrix
from tests.unit.kernels.grouped_weights import SAMPLES, GroupedWeights, grouped_weights
from tests.unit.kernels.instruction_sets import instruction_set as instruction_set
from tests.unit.kernels.instruction_sets import native, random

COUNTS = [1, 2, 4, 5, 12, 13, 31, 70]
SMALL = 2.0**-20
"""Of a weight times a number: what fp32 may lose of it."""

SHAPES = [(32, 32), (24, 18), (160, 48), (1040, 96), (64, 608)]
"""Hidden and inner width: whole units and panels, parts of them, several blocks of inputs, several strips of outputs.
"""


def computed(
    experts: list[GroupedWeights], starts: list[int], rows: torch.Tensor, *, add: bool = False, seed: int = 0
) -> torch.Tensor:
    tokens, scales = picks(starts[-1], len(rows), seed)
    out = random(seed, len(rows) if add else starts[-1], rows.shape[1])
    records = [one.record for one in experts]
    native.grouped_experts(experts[0].expert, records, starts, rows, tokens, scales, out, add=add)
    return out


def picks(count: int, rows: int, seed: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    tokens = generator.permutation(rows)[:count] if count <= rows else generator.integers(0, rows, count)
    return tokens, generator.random(count, dtype=np.float32)


def test_every_format_is_tested() -> None:
    assert SAMPLES.keys() >= {name for name, of in FORMATS.items() if isinstance(of, GroupedFormat)}
    assert {codes.name for of, _ in SAMPLES.values() for codes in of.products} == set(native.grouped_formats)


@matrix(2, name=list(SAMPLES), shape=SHAPES, count=COUNTS)
def test_sums_that_are_exact_are_those_of_the_expanded_weights(name: str, shape: tuple[int, int], count: int) -> None:
    """All weights are small integers, and so are the rows. Every sum is the same in any order."""
    hidden, inner = shape
    expert = grouped_weights(name, 3, hidden, inner, whole=True)
    rows = torch.randint(-1, 2, (count, hidden), generator=torch.Generator().manual_seed(4)).bfloat16()
    rows[:, 0] = 32
    coded, plain = computed([expert], [0, count], rows), torch.empty_like(rows)
    tokens, scales = picks(count, count, 0)
    expanded = tuple(tensor.bfloat16() for tensor in expert.expanded)
    assert all(torch.equal(a.float(), b) for a, b in zip(expanded, expert.expanded, strict=True))
    native.experts([expanded], [0, count], rows, tokens, scales, plain, add=False)
    assert torch.equal(coded, plain)
    assert len(set(coded.flatten().tolist())) > 10, "there is something to compare"


@given(
    st.sampled_from(list(SAMPLES)), st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31)
)
@settings(max_examples=60, deadline=None)
def test_products_are_those_of_the_expanded_weights(name: str, count: int, hidden: int, inner: int, seed: int) -> None:
    """Up to the order of sums and what that rounds. All codes are there."""
    expert, rows = grouped_weights(name, seed, 2 * hidden, 2 * inner), random(seed, count, 2 * hidden)
    tokens, scales = picks(count, count, seed)
    coded = computed([expert], [0, count], rows, seed=seed)
    up, down = (tensor.double() for tensor in expert.expanded)
    picked = rows[torch.from_numpy(tokens)].double()
    gate, other = (picked @ up.T).bfloat16().double().chunk(2, dim=1)
    between = (torch.nn.functional.silu(gate).bfloat16().double() * other).bfloat16().double()
    expected = between @ down.T * torch.from_numpy(scales)[:, None]
    # What one step of rounding of each number between both matrices may change, and the rounding of the results.
    margin = (between.abs() @ down.abs().T * torch.from_numpy(scales)[:, None]) * 2.0**-6 + expected.abs() * 2.0**-7
    if any("zeros" in codes.name for codes in expert.expert[:2]):
        # A sum less its zero point's is a difference of larger ones, and may be next to nothing.
        first, second = (SMALL * part.abs().sum(dim=1, keepdim=True) for part in (picked, between))
        changed = first * (2 * other.abs() + gate.abs() + first)
        margin += (changed @ down.abs().T + second) * torch.from_numpy(scales)[:, None]
    assert bool(((coded.double() - expected).abs() <= margin + 1e-30).all())


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (304, 96)])
def test_company_changes_nothing(name: str, hidden: int, inner: int) -> None:
    expert, rows = grouped_weights(name, 5, hidden, inner), random(6, 40, hidden)
    ones, everyone = np.ones(40, dtype=np.float32), np.arange(40)
    whole = torch.empty_like(rows)
    native.grouped_experts(expert.expert, [expert.record], [0, 40], rows, everyone, ones, whole, add=False)
    for count in COUNTS:
        few = torch.empty(min(count, 40), hidden, dtype=torch.bfloat16)
        native.grouped_experts(expert.expert, [expert.record], [0, len(few)], rows, everyone, ones, few, add=False)
        assert torch.equal(few, whole[: len(few)])


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("add", [False, True])
def test_several_experts_are_each_by_itself(name: str, add: bool) -> None:
    counts, hidden = [1, 7, 20], 64
    experts = [grouped_weights(name, 7 + number, hidden, 48) for number in range(len(counts))]
    starts = [0, *np.cumsum(counts).tolist()]
    rows = random(8, 20, hidden)
    together = computed(experts, starts, rows, add=add, seed=9)
    tokens, scales = picks(starts[-1], len(rows), 9)
    out = random(9, *together.shape)
    for expert, first, last in zip(experts, starts[:-1], starts[1:], strict=True):
        into = out if add else out[first:last]
        native.grouped_experts(
            expert.expert, [expert.record], [0, last - first], rows, tokens[first:last].copy(),
            scales[first:last].copy(), into, add=add,
        )  # fmt: skip
    assert torch.equal(together, out)


@pytest.mark.parametrize("name", SAMPLES)
def test_threads_change_nothing(name: str) -> None:
    expert, rows = grouped_weights(name, 5, 1024, 320), random(6, 14, 1024)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(computed([expert], [0, 14], rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_stay_in_their_rows(name: str, bad: float) -> None:
    x = random(7, 6, 64)
    x[2, 5] = bad
    expert = grouped_weights(name, 8, 64, 64)
    out = torch.empty_like(x)
    ones = np.ones(6, dtype=np.float32)
    native.grouped_experts(expert.expert, [expert.record], [0, 6], x, np.arange(6), ones, out, add=False)
    assert bool(out[2].isnan().any())
    assert bool(out[[0, 1, 3, 4, 5]].isfinite().all())
