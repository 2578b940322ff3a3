"""The benchmark of stored experts on a GPU: its arms on the CPU, with Triton's interpreter in the GPU's place."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from benchmarks.micro.expert_expansion import (
    FORMATS,
    RING,
    TORCH,
    Bench,
    Unavailable,
    expansion,
    main,
    own_product,
    steps,
    table,
)
from greenroom.experts.pack.layout import PLAIN
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.native.rows import NativeRows
from tests.compiled import native as native
from tests.interpreted import interpreted as interpreted

CPU = torch.device("cpu")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", FORMATS)
def test_all_arms_compute_the_same_and_are_timed(native: NativeRows, name: str) -> None:
    bench = Bench.of(name, 64, 32, picks=2, device=CPU, memory=1)
    arms = bench.arms()
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    picks, scales = torch.tensor([[0, 1], [3, 1], [2, 0]]), torch.full((3, 2), 0.5).bfloat16()
    with torch.inference_mode():
        plain, *others = (step(rows, picks, scales) for step in arms.values())
    assert bool(plain.isfinite().all())
    assert bool(plain.any())
    assert all(torch.equal(plain, other) for other in others)
    if name == MXFP4.name:
        stepped = steps(bench, arms, (1, 2), rounds=2, times=1)
        assert [(row["rows"], row["arm"]) for row in stepped] == [
            (n, arm) for n in (1, 2) for arm in (PLAIN, TORCH, RING)
        ]
        expanded = expansion(bench, rounds=2, times=1)
        assert [row["arm"] for row in expanded] == [TORCH, RING]
        assert len(table(expanded, stepped).splitlines()) == 2 + len(expanded) + len(stepped)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    found = CliRunner().invoke(main, [])
    assert found.exit_code == 1
    assert "it measures an NVIDIA GPU" in found.output


def test_a_format_without_a_product_of_its_own_says_so() -> None:
    with pytest.raises(Unavailable, match="needs a GPU"):
        own_product(Bench.of("int8", 64, 32, picks=1, device=CPU, memory=1), 64, 32)
