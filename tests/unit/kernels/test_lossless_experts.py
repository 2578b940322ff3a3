"""Compiled products of experts in lossless codes, or planes, are those of the same experts in bf16, to the bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.formats.lossless.record import LosslessFormat
from greenroom.moe.native.rows import Lasting, LosslessExpert
from tests.examples import examples
from tests.unit.kernels.instruction_sets import instruction_set as instruction_set
from tests.unit.kernels.instruction_sets import native, random
from tests.unit.kernels.lossless_weights import LOSSLESS_FORMATS, codes_of, lossless_record, matrix

widths = st.integers(1, 60).map(lambda n: 2 * n)


@pytest.fixture(params=LOSSLESS_FORMATS.values(), ids=list(LOSSLESS_FORMATS), scope="module")
def kept(request: pytest.FixtureRequest) -> LosslessFormat:
    own: LosslessFormat = request.param
    return own


def expert(seed: int, hidden: int, inner: int, *, finite: bool = True) -> ExpertWeights:
    return matrix(seed, 2 * inner, hidden, finite=finite), matrix(seed + 1, hidden, inner, finite=finite)


def both(
    kept: LosslessFormat,
    experts: list[ExpertWeights],
    starts: list[int],
    rows: torch.Tensor,
    *,
    add: bool = False,
    seed: int = 0,
) -> list[torch.Tensor]:
    """The results of the codes, and of the numbers."""
    count = starts[-1]
    generator = np.random.default_rng(seed)
    tokens, scales = generator.integers(0, len(rows), count), generator.random(count, dtype=np.float32)
    found = []
    of = LosslessExpert(kept.planes, experts[0][1].shape[1])
    for products, weights in (
        (partial(native.lossless_experts, of), [lossless_record(kept, one) for one in experts]),
        (native.experts, experts),
    ):
        out = random(seed, len(rows) if add else count, rows.shape[1])
        products(weights, np.array(starts), rows, tokens, scales, out, add=add)
        found.append(out)
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN in the same places, and everything else to the bit: zeros have signs."""
    numbers = ~one.isnan()
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one[numbers].view(torch.int16), other[numbers].view(torch.int16)
    )


@given(st.integers(1, 40), widths, widths, st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(80), deadline=None)
def test_products_are_those_of_the_numbers(
    kept: LosslessFormat, count: int, hidden: int, inner: int, finite: bool, seed: int
) -> None:
    coded, plain = both(kept, [expert(seed, hidden, inner, finite=finite)], [0, count], random(seed, count, hidden))
    assert same_bits(coded, plain)
    assert not finite or bool(coded.isfinite().all()), "there is something to compare"


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8, 9, 16, 17, 31, 40])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 96), (64, 610), (130, 46), (256, 128)])
def test_of_long_and_of_wide_matrices(kept: LosslessFormat, rows: int, hidden: int, inner: int) -> None:
    coded, plain = both(kept, [expert(3, hidden, inner)], [0, rows], random(4, rows, hidden))
    assert torch.equal(coded, plain)
    assert len(set(coded.flatten().tolist())) > 20


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(20), deadline=None)
def test_of_several_experts(kept: LosslessFormat, counts: list[int], add: bool, seed: int) -> None:
    experts = [expert(seed + 2 * number, 70, 34) for number in range(len(counts))]
    starts = [0, *np.cumsum(counts).tolist()]
    coded, plain = both(kept, experts, starts, random(seed, max(counts), 70), add=add, seed=seed)
    assert same_bits(coded, plain)


@pytest.mark.parametrize("rows", [1, 9])
def test_of_a_layer_all_of_whose_experts_are_resident(kept: LosslessFormat, rows: int) -> None:
    experts = [expert(10 * number, 96, 64) for number in range(5)]
    x, stream = random(1, rows, 96), random(2, rows, 96)
    picks = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(row))[:3] for row in range(rows)])
    scales = torch.rand(rows, 3, generator=torch.Generator().manual_seed(3))
    streams, busy = [], []
    records = [lossless_record(kept, one) for one in experts]
    all_of_them = partial(native.all_lossless_experts, LosslessExpert(kept.planes, 64))
    for products, weights in ((all_of_them, records), (native.all_experts, experts)):
        addresses = Lasting(np.array([[tensor.data_ptr() for tensor in one] for one in weights]))
        streams.append(stream.clone())
        busy.append(products(addresses, 64, picks, scales, x, streams[-1]))
    assert torch.equal(*streams)
    assert busy[0] == busy[1] > 0
    assert not torch.equal(streams[0], stream)


def test_threads_change_nothing(kept: LosslessFormat) -> None:
    one, rows = expert(5, 1024, 320), random(6, 14, 1024)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(both(kept, [one], [0, 14], rows)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@given(st.integers(1, 40), widths, st.booleans(), st.integers(0, 2**31))
@settings(max_examples=examples(60), deadline=None)
def test_the_numbers_come_back(kept: LosslessFormat, outputs: int, inputs: int, joined: bool, seed: int) -> None:
    outputs *= 2 if joined else 1
    numbers = matrix(seed, outputs, inputs, rare=32, finite=False)
    into = torch.empty_like(numbers)
    native.lossless_numbers(*codes_of(kept, numbers, joined=joined), into, planes=kept.planes, joined=joined)
    assert torch.equal(into.view(torch.int16), numbers.view(torch.int16))
