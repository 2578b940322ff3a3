"""Records expanded by Triton: in its interpreter against torch's expansion, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError
from greenroom.experts.all_resident import ResidentExperts
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.experts.source import Arriving
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, Expander
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.kernels import expert_ring
from greenroom.moe.kernels.expert_ring import MOST_BYTES, ExpertRing, Unsuited, expander_for, places_for
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from tests.examples import examples
from tests.interpreted import KERNELS, triton_or_skip
from tests.interpreted import interpreted as interpreted
from tests.matrices import matrix
from tests.mxfp4_checkpoints import save_mxfp4
from tests.unit.kernels.grouped_weights import SAMPLES, swiglu_layer
from tests.unit.kernels.lossless_weights import lossless_record
from tests.unit.kernels.mxfp4_weights import coded_expert
from tests.unit.kernels.stored_experts import (
    PAIR,
    STORED,
    TOP_K,
    bits_of,
    expanded,
    in_slots,
    noise,
    same_bits,
    stored_experts,
)

TO_COMPILE = [MXFP4.name, LOSSLESS.name, PAIR, "fp8-blocks", "int4-ordered"]
"""With these every part of the kernel is."""

CPU = torch.device("cpu")
WIDTHS = {"little": (40, 36), "odd": (134, 18), "wide": (290, 6), "whole": (256, 32)}
"""Hidden and inner widths. Those of MXFP4 are made multiples of 32."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    triton_or_skip()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    yield
    sys.modules.pop(KERNELS, None)


def launches_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts each launch from now on has."""
    launches: list[int] = []
    expand = ExpertRing.expand

    def noted(ring: ExpertRing, records: Sequence[ExpertWeights]) -> list[ExpertWeights]:
        launches.append(len(records))
        return expand(ring, records)

    monkeypatch.setattr(ExpertRing, "expand", noted)
    return launches


@pytest.mark.usefixtures("interpreted")
@matrix(1, name=STORED, dtype=[torch.bfloat16, torch.float32, torch.float16], widths=WIDTHS)
def test_numbers_are_those_of_torchs_expansion_to_the_bit(
    name: str, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    """Of several experts in one launch, and no other memory is written to."""
    own, layer, records = stored_experts(name, *widths, dtype, count=2)
    ring = ExpertRing(own, layer, CPU)
    assert ring.places == TOP_K
    ring(records[0])
    memory = ring._memory
    assert memory is not None
    bits_of(memory).fill_(0x5A5A)
    found = ring.expand(records)
    for numbers, record in zip(found, records, strict=True):
        assert same_bits(numbers, expanded(own, layer, record))
    for numbers in found:
        for tensor, part in zip(layer.tensors, numbers, strict=True):
            if len(tensor.shape) == 2:
                bits_of(memory)[part.storage_offset() : part.storage_offset() + part.numel()] = 0x5A5A
    assert bool((bits_of(memory) == 0x5A5A).all())


@pytest.mark.usefixtures("interpreted")
@given(
    outputs=st.integers(1, 20), inputs=st.integers(1, 330), rare=st.integers(0, 30), seed=st.integers(0, 99)
)  # fmt: skip
@settings(max_examples=examples(24), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rare_exponents_are_put_right(outputs: int, inputs: int, rare: int, seed: int) -> None:
    shapes = {"gate_up_proj": (2 * outputs, 2 * inputs), "down_proj": (inputs, 2 * outputs)}
    tensors = tuple(ExpertTensor(name, shape, torch.bfloat16) for name, shape in shapes.items())
    layer = MoeLayer("experts", 1, 1, tensors, stacked=True)
    numbers = tuple(noise(seed, tensor.shape, rare) for tensor in tensors)
    try:
        (record,) = in_slots(LOSSLESS, layer, [lossless_record(LOSSLESS, numbers)])
    except GreenroomError:  # more of them than there is room for
        return
    assert same_bits(ExpertRing(LOSSLESS, layer, CPU)(record), numbers)


@pytest.mark.usefixtures("interpreted")
def test_every_code_under_every_scale() -> None:
    """Of MXFP4 in float32, which has them all."""
    expert = coded_expert(0, 32, 32 * 8, scales=(0, 252), dtype=torch.float32)
    codes, scales = expert.record[0], expert.record[1]
    codes.copy_(torch.arange(codes.numel()).to(torch.uint8).view(codes.shape))
    scales.copy_((torch.arange(scales.numel()) % 253).to(torch.uint8).view(scales.shape))
    assert same_bits(ExpertRing(MXFP4, expert.layer, CPU)(expert.record), expanded(MXFP4, expert.layer, expert.record))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("arrived", [0, 1, 3, 5])
def test_what_has_arrived_goes_together_and_what_lands_alone(arrived: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own, layer, records = stored_experts("int8", 32, 16, torch.bfloat16, count=5)
    layer = replace(layer, top_k=2)
    launches = launches_of(monkeypatch)
    ring = ExpertRing(own, layer, CPU)
    coming = records[:arrived]
    one = ring.for_layer(lambda: coming)
    for record in records:
        coming = coming[1:]
        assert same_bits(one(record), expanded(own, layer, record))
    assert launches == [min(2, arrived - first) for first in range(0, arrived, 2)] + [1] * (5 - arrived)


@pytest.mark.usefixtures("interpreted")
def test_a_slot_that_was_filled_anew_within_a_layer_is_expanded_anew() -> None:
    """The record's views are the same ones, and so is what was said to come."""
    own, layer, (first, second) = stored_experts("int8", 32, 16, torch.bfloat16, count=2)
    one = ExpertRing(own, layer, CPU).for_layer(lambda: [first])
    for record in (first, second):
        for part, new in zip(first, record, strict=True):
            part.copy_(new)
        assert same_bits(one(first), expanded(own, layer, record))


def test_places_are_a_rows_picks_within_bounds() -> None:
    layer = swiglu_layer(64, 32)
    assert [places_for(replace(layer, top_k=k), 1 << 20) for k in (1, 4, 8, 64)] == [1, 4, 8, 8]
    assert [places_for(replace(layer, top_k=8), nbytes) for nbytes in (MOST_BYTES // 3, 2 * MOST_BYTES)] == [3, 1]


@pytest.mark.usefixtures("interpreted")
def test_the_plan_counts_what_the_places_take() -> None:
    own, layer, records = stored_experts("fp8-rows", 32, 16, torch.bfloat16, count=1)
    ring = ExpertRing(own, layer, CPU)
    assert ring.nbytes >= TOP_K * 2 * sum(math.prod(tensor.shape) for tensor in layer.tensors)
    ring(records[0])
    assert ring._memory is not None
    assert ring._memory.nbytes == ring.nbytes
    ring.release()
    assert ring._memory is None


def test_what_the_kernel_does_not_know_is_refused() -> None:
    with pytest.raises(Unsuited, match="does not know plain"):
        ExpertRing(PLAIN_FORMAT, swiglu_layer(32, 16), CPU)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", STORED)
def test_a_kernel_that_gives_other_numbers_is_not_used(name: str) -> None:
    own, layer, _ = stored_experts(name, 64, 32, torch.bfloat16, count=1)
    ring, by_torch = ExpertRing(own, layer, CPU), Expander(own, layer)
    expert_ring._try(ring, by_torch, own, layer, CPU)
    ring._compiled_for["DOWN_CODES"] += 64
    with pytest.raises(Unsuited, match="not torch's"):
        expert_ring._try(ring, by_torch, own, layer, CPU)


class Listed(ResidentExperts):
    """All picked experts of a layer are there at once."""

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        experts = self._weights[layer]
        return nullcontext([(int(e), experts[e]) for e in np.unique(picks) if e < len(experts)])


@pytest.mark.usefixtures("interpreted")
def test_a_models_logits_are_those_of_torchs_expansion_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = resolve(str(save_mxfp4(tmp_path / "model")))
    pack = PackFile.open(ensure_pack(checkpoint, cache_dir=tmp_path / "cache", expert_format=MXFP4))
    source = Listed.of_pack(pack)
    pack.close()
    tokens, logits = torch.tensor([[3, 1, 4, 1, 5]]), []
    launches = launches_of(monkeypatch)
    for expander in (Expander, partial(ExpertRing, device=CPU)):
        monkeypatch.setattr(
            "greenroom.moe.kernels.expert_hooks.expander_for", lambda own, layer, _, make=expander: make(own, layer)
        )
        loaded = load(checkpoint, products="torch", expert_format=MXFP4)
        attach(loaded, source)
        with torch.inference_mode():
            logits.append(loaded.model(tokens).logits)
    assert torch.equal(*logits)
    assert max(launches) > 1


def test_without_triton_torch_expands_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, KERNELS, None)
    layer = swiglu_layer(32, 16)
    found = expander_for(SAMPLES["int8"][0], layer, torch.device("cuda"))
    assert isinstance(found, Expander)
    assert "int8 are expanded one at a time by torch" in caplog.text
    assert "ModuleNotFoundError: import of greenroom" in caplog.text


def test_a_cpu_has_no_ring() -> None:
    layer = swiglu_layer(32, 16)
    for device in (None, CPU):
        assert isinstance(expander_for(SAMPLES["int8"][0], layer, device), Expander)


@pytest.mark.usefixtures("compiled")
@matrix(1, name=TO_COMPILE, capability=[80, 90, 120], dtype=[torch.bfloat16, torch.float32])
def test_the_kernel_compiles_and_writes_sixteen_bytes_at_a_time(name: str, capability: int, dtype: torch.dtype) -> None:
    """For GPUs that are not here; act-order apart, whose inputs are scattered."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    own, layer, _ = stored_experts(name, 256, 64, dtype, count=1)
    ring = ExpertRing(own, layer, CPU)
    kernel = importlib.import_module(KERNELS).expand_experts
    number = {torch.bfloat16: "*i16", torch.float32: "*fp32"}[layer.tensors[0].dtype]
    signature = {one: "i64" if one.startswith("record") else "constexpr" for one in kernel.arg_names}
    source = ASTSource(
        kernel,
        signature=signature | {"numbers": number},
        constexprs=dict(ring._compiled_for),
        attrs={(kernel.arg_names.index("numbers"),): [["tt.divisibility", 16]]},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": expert_ring._WARPS, "enable_fp_fusion": False},
    )
    assert made.asm["cubin"]
    assert "ordered" in name or re.search(r"st\.global\.v4\.[bf]32", made.asm["ptx"])
    if name == LOSSLESS.name:  # of each matrix: a tile, then its rare exponents
        found = re.findall(r"st\.global\.v4|st\.global\.b16|bar\.sync", made.asm["ptx"])
        assert [key for key, _ in groupby(found)] == ["st.global.v4", "bar.sync", "st.global.b16"] * 2
