"""What the benchmark of formats says of each arm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.micro.format_products import BESIDE, FORMATS, main, measured, other_build, row_of, same_bits, table
from greenroom.experts.pack.layout import PLAIN
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.native.library import native_library
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


def test_another_build_takes_turns(native: NativeRows, tmp_path: Path) -> None:
    """A copy of this one: the loader knows a file by its inode."""
    library = Path(native_library()._name)
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    other = other_build(copy)
    own, beside = (FORMATS["q4_k"].arms(one, hidden=256, inner=256, memory=1) for one in (native, other))
    arms = own | {BESIDE: beside["q4_k"]}
    assert same_bits(arms["q4_k"], arms[BESIDE], 256, 3)
    arms[BESIDE].weights[0][0].bitwise_xor_(1)
    assert not same_bits(arms["q4_k"], arms[BESIDE], 256, 3)
    found = measured(native, arms, 256, (2,), 1, work=1, sets=native.instruction_sets[:1])
    assert [row["format"] for row in found] == ["q4_k", PLAIN, BESIDE]
    assert ["over_beside" in row for row in found] == [True, False, False]
    assert "over beside" in table(found)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.so").write_bytes(b"none")
    result = CliRunner().invoke(main, ["--beside", str(tmp_path / "some.so")])
    assert result.exit_code == 2
    assert "--beside" in result.output


def test_gains_are_of_the_same_round() -> None:
    row = row_of("some", "mxfp4", 4, [0.5, 1.0], [1.0, 3.0], int(2e9), [2.0, 1.0])
    assert row["over_beside"] == {"median": 2.5, "min": 1.0, "max": 4.0}
    assert "over_beside" not in row_of("some", PLAIN, 4, [1.0], [1.0], 1, [1.0])
    assert row["microseconds"] == {"median": 750_000.0, "min": 500_000.0, "max": 1_000_000.0}
    assert row["gb_s"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert row["over_bf16"] == {"median": 2.5, "min": 2.0, "max": 3.0}
