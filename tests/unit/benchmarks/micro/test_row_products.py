"""What the benchmark of products says of each arm."""

from __future__ import annotations

import pytest
import torch

from benchmarks.micro.row_products import KINDS, TORCH, measured, row_of, shape_of, table
from greenroom.core.errors import InvalidConfig
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows


@pytest.mark.parametrize("kind", KINDS)
def test_each_instruction_set_and_torch_are_timed_with_each_number_of_rows(kind: str) -> None:
    try:
        native = native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    before = native.instruction_set
    found = measured(KINDS[kind](64, 32, memory=1), (1, 3), 2, work=1)
    assert [(row["rows"], row["products_by"]) for row in found] == [
        (rows, name) for rows in (1, 3) for name in (*native.instruction_sets, TORCH)
    ]
    assert native.instruction_set == before
    assert len(table(found).splitlines()) == 1 + len(found)


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_compute_the_same(kind: str) -> None:
    try:
        native = native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    experts = KINDS[kind](64, 32, memory=1)
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = experts.compiled(native, native.instruction_set, rows)(1), experts.by_torch(rows)(1)
    torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-9)


def test_speeds_are_of_the_weights_and_of_their_products_with_all_rows() -> None:
    row = row_of("some", 4, [0.5, 1.0], [1.0, 3.0], int(2e9))
    assert row["microseconds"] == {"median": 750_000.0, "min": 500_000.0, "max": 1_000_000.0}
    assert row["gb_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert row["g_products_s"] == {"median": 6.0, "min": 4.0, "max": 8.0}
    assert row["over_torch"] == {"median": 2.5, "min": 2.0, "max": 3.0}


@pytest.mark.parametrize("text", ["768", "768x", "x2048", "0x4", "3x3", "768x2048x2", "-1x2"])
def test_a_shape_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="HIDDENxINNER"):
        shape_of(text)


def test_a_shape() -> None:
    assert shape_of("768x2048") == (768, 2048)
