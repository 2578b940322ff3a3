"""Packs and slots take the bytes of the checkpoint's own experts, in each format that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import PackLayer, PackManifest
from greenroom.experts.pack.pack_file import PackFile, pack_bytes
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.gguf_storage import gguf_format
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.formats.registry import FORMATS, shipped_of
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.packing import ensure_pack
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from tests import fp8_checkpoints, int4_checkpoints
from tests.random_checkpoints import save_random
from tests.stored_checkpoints import KINDS
from tests.unit.kernels.grouped_weights import swiglu_layer
from tests.unit.kernels.mxfp4_weights import layer_of

SHAPES: Final = {
    "gpt-oss": (2880, 2880),
    "Qwen3-30B-A3B": (2048, 768),
    "Mixtral-8x7B": (4096, 14336),
    "DeepSeek-V3": (7168, 2048),
}
"""Hidden and inner width. The experts' matrices are twice ``[inner, hidden]`` and once ``[hidden, inner]``."""
LAYERS, EXPERTS = 24, 32
MOST: Final = 1.02

Shipped = Callable[[int, int], int]
"""From a matrix's outputs and inputs to the bytes that the checkpoint has for it, by the format's published layout."""


@dataclass(frozen=True)
class Case:
    """``shipped``: of the gate or up projection, and of the down projection. ``whole``: what both widths are multiples
    of. ``biases``: bytes of an expert's for each number of its width. ``most``: what the ratio may be."""

    kept: ExpertFormat
    shipped: tuple[Shipped, Shipped]
    whole: int = 32
    biased: bool = False
    most: float = MOST


def fp8(strategy: str, scale_bytes: int) -> Shipped:
    scales: dict[str, Shipped] = {
        "block": lambda outputs, inputs: -(-outputs // 128) * -(-inputs // 128),
        "channel": lambda outputs, inputs: outputs,
        "tensor": lambda outputs, inputs: 1,
    }
    return lambda outputs, inputs: outputs * inputs + scale_bytes * scales[strategy](outputs, inputs)


def int4(kind: int4_checkpoints.Kind) -> Shipped:
    def shipped(outputs: int, inputs: int) -> int:
        groups = 1 if kind.group == -1 else inputs // kind.group
        codes_and_scales = outputs * inputs // 2 + kind.scales.itemsize * outputs * groups
        zeros = 0 if kind.symmetric and kind.method != "gptq" else outputs * groups // (1 if kind.int8_zeros else 2)
        order = 4 * inputs if kind.ordered or kind.method == "gptq" else 0
        shape = 16 if kind.method == "compressed-tensors" else 0
        return codes_and_scales + zeros + order + shape

    return shipped


def blocks(kind: Kind) -> Shipped:
    numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return lambda outputs, inputs: outputs * inputs // numbers * nbytes


def bf16(outputs: int, inputs: int) -> int:
    return 2 * outputs * inputs


def cases() -> Iterator[tuple[str, Case]]:
    for name, (settings, _, strategy) in fp8_checkpoints.KINDS.items():
        for scale_bytes in (4, 2):
            own = fp8(strategy, scale_bytes)
            yield f"fp8-{name}-scales-of-{scale_bytes}", Case(format_of(settings), (own, own))
    for name, kind in int4_checkpoints.KINDS.items():
        for group in (kind.group,) if kind.group == -1 else (32, 128):
            of_group = replace(kind, group=group)
            kept = format_of(of_group.settings)
            if kept is PLAIN_FORMAT or kind.scales is torch.float32:
                continue  # expanded, as test_int4.py shows
            yield f"{name}-{group}", Case(kept, (int4(of_group), int4(of_group)), max(32, group))
    types = (Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.MXFP4)
    for first in types:
        for second in types:
            kept = gguf_format({"layer": (first.name, first.name, second.name)})
            whole = 256 if {first, second} & {Kind.Q4_K, Kind.Q6_K} else 32
            yield f"gguf-{first.name}-{second.name}", Case(kept, (blocks(first), blocks(second)), whole)
    mxfp4 = blocks(Kind.MXFP4)  # 16 bytes of codes and one of a scale, in one tensor or in two
    yield "mxfp4", Case(MXFP4, (mxfp4, mxfp4), biased=True)
    yield "lossless", Case(LOSSLESS, (bf16, bf16), most=0.76)
    yield "lossless-planes", Case(LOSSLESS_PLANES, (bf16, bf16), most=0.72)


def format_of(settings: Mapping[str, Any]) -> ExpertFormat:
    found = shipped_of({"quantization_config": settings})
    assert found is not None
    return found.format


CASES: Final = dict(cases())


def test_each_format_is_among_them() -> None:
    assert {case.kept.name for case in CASES.values()} == {*FORMATS, "int4"} - {PLAIN_FORMAT.name}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name, case in CASES.items()
        for shape, widths in SHAPES.items()
        if all(width % case.whole == 0 for width in widths)
    ],
)
def test_packs_and_slots_have_hardly_more_than_the_checkpoint(name: str, shape: str) -> None:
    """From shapes alone: nothing is allocated."""
    case, (hidden, inner) = CASES[name], SHAPES[shape]
    layer = layer_of(hidden, inner) if case.biased else swiglu_layer(hidden, inner, torch.bfloat16)
    first, second = case.shipped
    expert = 2 * first(inner, hidden) + second(hidden, inner) + (2 * (2 * inner + hidden) if case.biased else 0)
    ours = pack_and_slots(case.kept, layer)
    assert max(ours) <= case.most * LAYERS * EXPERTS * expert, f"stored_bytes_ratio {ratio(ours, expert)}"
    assert min(ours) >= (0.97 if case.most >= 1 else 0.7) * LAYERS * EXPERTS * expert, "something is left out"


def ratio(ours: tuple[int, int], expert: int) -> str:
    return " and ".join(f"{nbytes / LAYERS / EXPERTS / expert:.4f}" for nbytes in ours)


def pack_and_slots(kept: ExpertFormat, layer: MoeLayer) -> tuple[int, int]:
    """Bytes of a pack, from its first to its last, and of slots for all of its experts."""
    layout = kept.record(layer)
    layers = tuple(PackLayer(f"layers.{number}", EXPERTS, 4, layout, kept.name) for number in range(LAYERS))
    catalogue = Catalogue.uniform("model", layers=LAYERS, experts=EXPERTS, top_k=4, expert_bytes=layout.nbytes)
    return pack_bytes(PackManifest("model", "bfloat16", "0" * 32, layers)), SlotSizes(catalogue).all_bytes


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(
        "qwen3_moe", tmp_path_factory.mktemp("plain") / "model", dtype=torch.bfloat16, hidden_size=256,
        moe_intermediate_size=256, num_hidden_layers=2, num_experts=4, head_dim=64,
    )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_no_expanded_bytes_are_anywhere_in_a_pack(name: str, plain: Path, tmp_path: Path) -> None:
    kind = KINDS[name]
    checkpoint = resolve(str(kind.write(plain, tmp_path / "stored", None)))
    stored = ensure_pack(checkpoint, cache_dir=tmp_path / "packs", expert_format=kind.kept(checkpoint))
    expanded = PackFile.open(ensure_pack(checkpoint, cache_dir=tmp_path / "packs"))
    content, rows = stored.read_bytes(), 0
    for number, layer in enumerate(expanded.manifest.layers):
        memory = page_aligned(layer.layout.nbytes)
        record = torch.frombuffer(memory, dtype=torch.uint8)
        for expert in range(layer.experts):
            expanded.read_into(number, expert, memory)
            for matrix in (one for one in layer.layout.views(record) if one.dim() == 2):
                for row in matrix[::8]:
                    for numbers in (row[:16], row[-16:]):
                        if len(numbers.unique()) < 5:
                            continue  # under a scale of about 0; so few numbers could be anything
                        rows += 1
                        assert numbers.clone().view(torch.uint8).numpy().tobytes() not in content
                        assert numbers.float().view(torch.uint8).numpy().tobytes() not in content
    assert rows > 500
    pack = PackFile.open(stored)
    assert set(pack.manifest.formats) == kind.formats
    assert len(content) == pack_bytes(pack.manifest) < 0.8 * pack_bytes(expanded.manifest)
    for one in (pack, expanded):
        one.close()
