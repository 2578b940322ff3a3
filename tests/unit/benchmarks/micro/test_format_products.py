"""What the benchmark of formats says of each arm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.micro.format_products import FORMATS, measured, row_of, table
from greenroom.experts.pack.layout import PLAIN
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.native.rows import NativeRows
from tests.compiled import native as native


@pytest.mark.parametrize("name", FORMATS)
def test_both_are_timed_by_each_instruction_set_and_compute_the_same(native: NativeRows, name: str) -> None:
    before = native.instruction_set
    arms = FORMATS[name].arms(native, hidden=64, inner=32, memory=1)
    found = measured(native, arms, 64, (1, 3), 2, work=1)
    assert [(row["rows"], row["instructions"], row["format"]) for row in found] == [
        (rows, instructions, kept)
        for rows in (1, 3)
        for instructions in native.instruction_sets
        for kept in (name, PLAIN)
    ]
    assert native.instruction_set == before
    assert len(table(found).splitlines()) == 1 + len(found)
    assert arms[name].nbytes < arms[PLAIN].nbytes
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for arm in arms.values():
        results.append(torch.empty_like(rows))
        scales = np.ones(3, dtype=np.float32)
        arm.products([arm.weights[1]], [0, 3], rows, np.arange(3), scales, results[-1], add=False)
    if name == MXFP4.name:
        assert torch.equal(*results)
    assert torch.allclose(
        results[0].float(), results[1].float(), rtol=2.0**-5, atol=2.0**-5 * float(results[1].abs().max())
    )


LINEAR = [name for name, kind in FORMATS.items() if kind.linear is not None]


@pytest.mark.parametrize("name", LINEAR)
def test_linear_layers_are_timed_the_same_way(native: NativeRows, name: str) -> None:
    made = FORMATS[name].linear
    assert made is not None
    arms = made(native, outputs=32, inputs=64, memory=1)
    found = measured(native, arms, 64, (1,), 1, work=1, sets=native.instruction_sets[:1])
    assert [row["format"] for row in found] == [name, PLAIN]
    assert arms[name].nbytes < arms[PLAIN].nbytes
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    own, plain = (native.linear_layer(rows, arm.weights[1][0]).float() for arm in arms.values())
    assert torch.allclose(own, plain, rtol=2.0**-5, atol=2.0**-5 * float(plain.abs().max()))


def test_gains_are_of_the_same_round() -> None:
    row = row_of("some", "mxfp4", 4, [0.5, 1.0], [1.0, 3.0], int(2e9))
    assert row["microseconds"] == {"median": 750_000.0, "min": 500_000.0, "max": 1_000_000.0}
    assert row["gb_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert row["over_bf16"] == {"median": 2.5, "min": 2.0, "max": 3.0}
