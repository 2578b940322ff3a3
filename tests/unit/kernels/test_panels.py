"""The layout of codes that share scales: every code has one place, and comes back from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.checkpoints import gguf_blocks
from greenroom.moe.formats import byte_moves, panels
from greenroom.moe.formats.byte_moves import fields, transposed
from greenroom.moe.formats.panels import (
    HALF,
    PANEL,
    UNIT,
    bit_codes,
    byte_codes,
    halves_of,
    halves_of_bits,
    halves_of_bytes,
    halves_of_lanes,
    lane_values,
    rows_of,
)
from tests.examples import examples

outputs = st.integers(1, 40).map(lambda quarter: 4 * quarter)
inputs = st.integers(1, 50).map(lambda half: 2 * half)


def codes_of(outputs: int, inputs: int, below: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs * 1000 + inputs)
    return torch.randint(0, below, (outputs, inputs), dtype=torch.uint8, generator=generator)


@given(outputs, inputs, st.booleans())
@settings(max_examples=40, deadline=None)
def test_everything_comes_back(outputs: int, inputs: int, joined: bool) -> None:
    codes = codes_of(outputs, inputs)
    assert torch.equal(rows_of(halves_of(codes, joined=joined), outputs, joined=joined), codes)
    bytes_back = rows_of(halves_of_bytes(byte_codes(codes, joined=joined)), outputs, joined=joined)
    assert torch.equal(bytes_back[:, :inputs], codes)
    assert torch.equal(rows_of(halves_of_lanes(lane_values(codes, joined=joined)), outputs, joined=joined), codes)
    for bits in (1, 2, 4):
        few = codes_of(outputs, inputs, 1 << bits)
        packed = bit_codes(few, bits, joined=joined)
        assert packed.shape[2] * 8 == UNIT * PANEL * bits
        assert torch.equal(rows_of(halves_of_bits(packed, bits), outputs, joined=joined)[:, :inputs], few)


@pytest.mark.parametrize("joined", [False, True])
def test_where_a_byte_lies(joined: bool) -> None:
    codes = codes_of(96, 80)
    laid = byte_codes(codes, joined=joined)
    assert laid.shape == (3, 3, UNIT * PANEL)
    for output, of in ((0, 0), (17, 33), (50, 79), (95, 64)):
        neurons = 48
        if joined:
            panel, half, lane = output % neurons // HALF, output // neurons, output % neurons % HALF
        else:
            panel, half, lane = output // PANEL, output % PANEL // HALF, output % HALF
        place = of % UNIT * PANEL + half * HALF + lane
        assert laid[panel, of // UNIT, place] == codes[output, of]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_where_bits_lie(bits: int) -> None:
    codes = codes_of(64, 64, 1 << bits)
    words = bit_codes(codes, bits, joined=False).view(torch.int32).view(2, 2, -1, HALF)
    together = 16 // bits
    for output, of in ((0, 0), (21, 35), (47, 63)):
        panel, half, lane = output // PANEL, output % PANEL // HALF, output % HALF
        word = int(words[panel, of // UNIT, of % UNIT // together, lane]) & 0xFFFFFFFF
        shift = bits * (2 * (of % together) + half)
        assert word >> shift & (1 << bits) - 1 == codes[output, of]


def test_what_is_missing_is_zero() -> None:
    laid = byte_codes(torch.full((20, 6), 9, dtype=torch.uint8), joined=True)
    assert laid.shape == (1, 1, UNIT * PANEL)
    assert int((laid == 9).sum()) == 20 * 6
    assert int((laid != 0).sum()) == 20 * 6


@given(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31))
@settings(max_examples=examples(120), deadline=None)
def test_bytes_change_places_as_by_torch(count: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randint(0, 256, (count, rows, columns + 3), dtype=torch.uint8, generator=generator)[..., 3:]
    assert torch.equal(transposed(matrices), matrices.transpose(1, 2))


def test_bytes_change_places_without_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = torch.arange(2 * 20 * 33, dtype=torch.int32).to(torch.uint8).view(2, 20, 33)
    compiled = transposed(matrices)
    monkeypatch.setattr(byte_moves, "native_rows_or_none", lambda: None)
    assert torch.equal(transposed(matrices), compiled)
    assert transposed(matrices).is_contiguous()


@given(outputs, inputs, st.booleans(), st.sampled_from([1, 2, 4]))
@settings(max_examples=examples(120), deadline=None)
def test_bits_are_laid_out_alike_without_what_is_compiled(outputs: int, inputs: int, joined: bool, bits: int) -> None:
    codes = codes_of(outputs, inputs, 1 << bits)
    compiled = bit_codes(codes, bits, joined=joined)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "native_rows_or_none", lambda: None)
        plain = bit_codes(codes, bits, joined=joined)
    assert torch.equal(compiled, plain)


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from([1, 2, 8, 16, 32, 33]), st.sampled_from([2, 4]))
@settings(max_examples=examples(120), deadline=None)
def test_bits_come_apart_as_by_torch(rows: int, runs: int, width: int, bits: int) -> None:
    data = codes_of(rows, runs * width + 7)[:, 3:-4]
    assert torch.equal(fields(data, width, bits), gguf_blocks.fields(data, width, bits))
