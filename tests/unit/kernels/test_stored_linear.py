"""Compiled products of linear layers whose weights stay in codes that share scales."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from greenroom.experts.pack.layout import DTYPES
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.grouped_format import MatrixFormat
from greenroom.moe.kernels.stored_linear import StoredLinear
from greenroom.moe.native.rows import AttentionWeights, GroupedMatrix, LinearWeights
from tests.examples import examples
from tests.matrices import matrix
from tests.unit.kernels.grouped_weights import SAMPLES
from tests.unit.kernels.instruction_sets import instruction_set as instruction_set
from tests.unit.kernels.instruction_sets import native, random

FORMATS = {name: of for name, (of, _) in SAMPLES.items() if isinstance(of, MatrixFormat)}
COUNTS = [1, 2, 4, 5, 12, 13, 31, 70]
SHAPES = [(32, 32), (18, 24), (48, 160), (1040, 96), (608, 64)]
"""Outputs and inputs: whole units and panels, parts of them, several blocks of inputs, several strips of outputs."""
LOST = 2.0**-18
"""Of a row's numbers times the largest weight: what fp32 may lose."""


class Layer(NamedTuple):
    """``weights``: of ``matrix`` with ``bias``. ``expanded``: in float32."""

    matrix: GroupedMatrix
    bias: torch.Tensor | None
    weights: LinearWeights
    expanded: torch.Tensor


def layer(
    name: str, seed: int, outputs: int, inputs: int, *, bias: torch.Tensor | None = None, whole: bool = False
) -> Layer:
    kept, (_, sample) = FORMATS[name], SAMPLES[name]
    tensor = ExpertTensor("weight", (outputs, inputs), torch.float32)
    stored = sample(tensor, torch.Generator().manual_seed(seed), whole)
    parts = kept.parts_alone(outputs, inputs)
    own = GroupedMatrix(
        kept.products[1], outputs, tuple(torch.empty(shape, dtype=DTYPES[dtype]) for _, shape, dtype in parts)
    )
    kept.lay_out_alone(stored, own.tensors)
    expanded = torch.empty(outputs, inputs)
    kept.expand(MoeLayer("linear", 1, 1, (tensor,), stacked=True), own.tensors, (expanded,))
    return Layer(own, bias, native.linear_weights(own, bias), expanded)


@matrix(1, name=list(FORMATS), shape=SHAPES, count=COUNTS, biased=[False, True])
def test_sums_that_are_exact_are_those_of_the_expanded_weight(
    name: str, shape: tuple[int, int], count: int, biased: bool
) -> None:
    """All weights are small integers, or halves of them, and so are the rows. Every sum is the same in any order."""
    outputs, inputs = shape
    bias = random(9, outputs).round() if biased else None
    own = layer(name, 3, outputs, inputs, bias=bias, whole=True)
    weight = own.expanded.bfloat16()
    assert torch.equal(weight.float(), own.expanded)
    rows = torch.randint(-1, 2, (count, inputs), generator=torch.Generator().manual_seed(4)).bfloat16()
    found = native.linear_layer(rows, own.weights)
    assert torch.equal(found, native.linear(rows, weight, bias))
    assert torch.equal(found, native.linear_layer(rows, native.linear_weights(weight, bias)))
    assert len(set(found.flatten().tolist())) > 10, "there is something to compare"


@given(
    st.sampled_from(list(FORMATS)), st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.integers(0, 2**31)
)
@settings(max_examples=examples(60), deadline=None)
def test_products_are_those_of_the_expanded_weight(name: str, count: int, outputs: int, inputs: int, seed: int) -> None:
    """Up to the order of sums and what that rounds. All codes are there."""
    own, rows = layer(name, seed, 2 * outputs, 2 * inputs), random(seed, count, 2 * inputs)
    expected = rows.double() @ own.expanded.double().T
    margin = expected.abs() * 2.0**-8 + LOST * rows.double().abs().sum(dim=1, keepdim=True) * own.expanded.abs().max()
    assert bool(((native.linear_layer(rows, own.weights).double() - expected).abs() <= margin + 1e-30).all())


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_the_unit_matrix_gives_the_expanded_weight(name: str) -> None:
    """To the bit, once it is rounded: a code's number is the checkpoint's."""
    own = layer(name, 11, 48, 96)
    found = native.linear_layer(torch.eye(96).bfloat16(), own.weights)
    assert torch.equal(found, own.expanded.bfloat16().T)


@pytest.mark.parametrize("name", FORMATS)
def test_company_changes_no_row(name: str) -> None:
    own, rows = layer(name, 5, 288, 160), random(6, 70, 160)
    whole = native.linear_layer(rows, own.weights)
    for count in COUNTS:
        assert torch.equal(native.linear_layer(rows[:count].contiguous(), own.weights), whole[:count])


@pytest.mark.parametrize("name", ["fp8-blocks", "q4_k", "int4-ordered"])
def test_threads_change_no_row(name: str) -> None:
    """Of a layer that is worth several."""
    own, rows = layer(name, 5, 1056, 256), random(6, 5, 256)
    whole = native.linear_layer(rows, own.weights)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(native.linear_layer(rows, own.weights), whole)
    finally:
        torch.set_num_threads(before)


@given(
    st.lists(st.sampled_from([*FORMATS, None]), min_size=4, max_size=4), st.integers(1, 40), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_what_is_around_attention_takes_each_projection_as_it_is(
    names: list[str | None], count: int, biased: bool, seed: int
) -> None:
    """None: in bf16. All is what its parts are one by one, to the bit."""
    hidden, dim = 48, 32
    widths = {"query": (4 * dim, hidden), "key": (dim, hidden), "value": (dim, hidden), "output": (hidden, 4 * dim)}
    of = AttentionWeights(hidden=hidden, dim=dim, before_epsilon=1e-6, after_epsilon=1e-5)
    norms = {"before": random(seed, hidden), "after": random(seed + 1, hidden)}
    for side, norm in norms.items():
        setattr(of, side, norm.data_ptr())
    kept = []  # addresses are all that the products have
    for place, (part, shape) in enumerate(widths.items()):
        name, bias = names[place], random(seed + place, shape[0]) if biased else None
        weight = random(seed + 5 + place, *shape)
        own = None if name is None else layer(name, seed + place, *shape, bias=bias)
        kept.append((weight, bias, own))
        setattr(of, part, native.linear_weights(weight, bias) if own is None else own.weights)

    stream, cosines, sines = random(seed + 2, count, hidden), random(seed + 3, count, dim), random(seed + 4, count, dim)
    normed = native.rms_norm(stream, norms["before"], 1e-6)
    for part, found in zip(widths, native.before_attention(of, stream, cosines, sines), strict=False):
        expected = native.linear_layer(normed, getattr(of, part)).view(found.shape)
        if part != "value":
            native.rotate(expected, cosines, sines)
        assert torch.equal(found, expected), part
    mixed, after = random(seed + 18, count, 4 * dim), stream.clone()
    out = native.after_attention(of, mixed, after)
    assert torch.equal(after, stream + native.linear_layer(mixed, of.output))
    assert torch.equal(out, native.rms_norm(after, norms["after"], 1e-5))


def test_the_module_is_its_product() -> None:
    own, inputs = layer("int8", 7, 64, 96, bias=random(8, 64)), random(9, 2, 5, 96)
    linear = nn.Linear(96, 64, bias=True, dtype=torch.bfloat16)
    assert own.bias is not None
    linear.bias = nn.Parameter(own.bias, requires_grad=False)
    module = StoredLinear(linear)
    module.store(native, own.matrix)
    with torch.inference_mode():
        found = module(inputs)
        assert torch.equal(found, native.linear_layer(inputs.view(10, 96), own.weights).view(2, 5, 64))
        assert torch.equal(module(inputs[:, ::2]), found[:, ::2]), "rows that are not side by side"
        for wrong in (inputs.float(), inputs.half(), inputs.to("meta")):
            with pytest.raises(TypeError, match="takes bfloat16 on the CPU, not"):
                module(wrong)
    assert (module.weight.dtype, module.weight.shape) == (linear.weight.dtype, linear.weight.shape)
    assert {tensor.data_ptr() for tensor in module.buffers()} == {part.data_ptr() for part in own.matrix.tensors}
    assert module.state_dict().keys() == {"bias"}, "codes are of the checkpoint, not of the model"


GROWTH = """
import sys
from pathlib import Path
import torch
from greenroom.experts.pack.layout import DTYPES
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.native.rows import GroupedMatrix, native_rows

native, of, width = native_rows(), Int4(128, ordered=sys.argv[1] == "ordered"), 2048
torch.set_num_threads(8)
tensors = [torch.zeros(shape, dtype=DTYPES[dtype]) for _, shape, dtype in of.parts_alone(width, width)]
if of.ordered:
    tensors[-1].copy_(torch.randperm(width))
weights = native.linear_weights(GroupedMatrix(of.products[1], width, tuple(tensors)))
rows = torch.randn(1024, width).bfloat16()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

native.linear_layer(rows[:1], weights)
before = resident()
native.linear_layer(rows, weights)
print((resident() - before) * 4096)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc says what a process takes")
def test_an_order_takes_no_memory_for_each_thread(instruction_set: str) -> None:
    """A copy of the rows for each of 8 threads would be 32 MiB."""
    if instruction_set != native.instruction_sets[0]:
        pytest.skip("one instruction set is enough: rows are put in order before")
    grown = {
        kind: int(
            subprocess.run([sys.executable, "-c", GROWTH, kind], check=True, capture_output=True, timeout=120).stdout
        )
        for kind in ("plain", "ordered")
    }
    assert grown["ordered"] < grown["plain"] + 2**21
