"""FP8 checkpoints: records mean what transformers makes of them, dense layers become it, what is broken is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.fp8 import FP8_BLOCKS, FP8_ROWS
from greenroom.moe.loading.checkpoint import Checkpoint, resolve, resolve_config
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows
from greenroom.worker.model.checkpoint_summary import summarise
from tests.fp8_checkpoints import KINDS, LAYOUTS, Tensors, all_tensors, dequantized, rewrite, to_fp8
from tests.random_checkpoints import EXPERTS, edit_json, save_random

SIZES: dict[str, Any] = {"hidden_size": 160, "moe_intermediate_size": 144}
"""Of which neither is a multiple of a block."""
STORED = dict.fromkeys(("blocks", "compressed-blocks", "minimax", "powers"), FP8_BLOCKS)


def stored_as(kind: str) -> ExpertFormat:
    return STORED.get(kind, FP8_ROWS)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("qwen3_moe", tmp_path_factory.mktemp("numbers"), dtype=torch.bfloat16, **SIZES)


@pytest.fixture
def blocks(numbers: Path, tmp_path: Path) -> Path:
    return to_fp8(numbers, tmp_path / "model")


def expert_of(tensors: Tensors, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, down = (
        tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return torch.cat([gate, up]), down


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *LAYOUTS])
def test_records_mean_what_transformers_makes(kind: str, scales: torch.dtype, numbers: Path, tmp_path: Path) -> None:
    checkpoint = resolve(str(to_fp8(numbers, tmp_path / "model", kind, scales=scales)))
    theirs = dequantized(checkpoint.folder, torch.bfloat16)
    for kept in (PLAIN_FORMAT, stored_as(kind)):
        plan = ExpertPlan(checkpoint, torch.bfloat16, kept)
        pack = PackFile.open(ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=kept))
        assert pack.manifest.formats == (kept.name,)
        layer = plan.layers[1]
        for expert in (0, EXPERTS - 1):
            made = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in layer.tensors)
            kept.expand(layer, record_of(pack, 1, expert), made)
            for ours, expected in zip(made, expert_of(theirs, 1, expert), strict=True):
                assert torch.equal(ours.view(torch.int16), expected.view(torch.int16))
        pack.close()


def record_of(pack: PackFile, layer: int, expert: int) -> ExpertWeights:
    layout = pack.manifest.layers[layer].layout
    record = page_aligned(layout.nbytes)
    pack.read_into(layer, expert, record)
    return layout.views(torch.frombuffer(record, dtype=torch.uint8))


@pytest.mark.parametrize("kind", [*KINDS, *LAYOUTS])
def test_dense_layers_are_what_transformers_makes(kind: str, numbers: Path, tmp_path: Path) -> None:
    folder = to_fp8(numbers, tmp_path / "model", kind)
    theirs = dequantized(folder, torch.bfloat16)
    model = load(resolve(str(folder)), products="torch", expert_format=stored_as(kind)).model
    dense = {name: value for name, value in theirs.items() if ".experts." not in name}
    assert any("self_attn" in name for name in dense)
    for name, value in dense.items():
        assert torch.equal(model.get_parameter(name), value), name


def test_what_experts_are_kept_as(blocks: Path) -> None:
    checkpoint = resolve(str(blocks))
    assert kept_format(checkpoint, experts_as="stored", dtype="float32") is FP8_BLOCKS
    assert kept_format(checkpoint, experts_as="expanded") is PLAIN_FORMAT
    for options in ({"dtype": "float32"}, {"products": "torch"}, {"device": "cuda"}):
        assert kept_format(checkpoint, **options) is PLAIN_FORMAT, "torch would expand at each use"
    try:
        native_rows()
    except NativeUnavailable:
        assert kept_format(checkpoint) is PLAIN_FORMAT
    else:
        assert kept_format(checkpoint) is FP8_BLOCKS


def test_experts_that_no_compiled_product_knows_are_expanded(numbers: Path, tmp_path: Path) -> None:
    folder = to_fp8(numbers, tmp_path / "model")
    edit_json(folder / "config.json", lambda config: config.update(hidden_act="gelu"))
    assert kept_format(resolve(str(folder))) is PLAIN_FORMAT


def test_qwen3_takes_hardly_more_than_it_ships(tmp_path: Path) -> None:
    """Qwen3-30B-A3B-FP8's shapes."""
    hidden, inner = 2048, 768
    config = Qwen3MoeConfig(hidden_size=hidden, moe_intermediate_size=inner, dtype="bfloat16", num_hidden_layers=2)
    for kind, scales in (("blocks", 3 * hidden * inner / 128**2), ("compressed-channels", 2 * inner + hidden)):
        config.quantization_config = KINDS[kind][0]
        config.save_pretrained(tmp_path)
        stored = summarise(resolve_config(str(tmp_path)), experts_as="stored")
        shipped = 3 * hidden * inner + 4 * scales
        assert shipped <= stored.mean_expert_bytes <= 1.02 * shipped
        assert stored.expert_format == stored_as(kind).name


def test_one_wrong_number_is_seen(blocks: Path, tmp_path: Path) -> None:
    """The same codes under another scale make another pack."""
    first = ensure_pack(resolve(str(blocks)), cache_dir=tmp_path, expert_format=FP8_BLOCKS)
    rewrite(blocks, lambda tensors: tensors[SCALE].mul_(2))
    assert ensure_pack(resolve(str(blocks)), cache_dir=tmp_path, expert_format=FP8_BLOCKS) != first


EXPERT = "model.layers.1.mlp.experts.3.up_proj"
WEIGHT, SCALE = f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv"
DENSE = "model.layers.2.self_attn.o_proj"


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def replaced(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors[name]).contiguous()})


def coded(name: str, at: tuple[int, int], code: int) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(torch.uint8)[at] = code

    return change


def in_bf16(tensors: Tensors) -> None:
    """All experts as numbers."""
    for name in [name for name in tensors if ".experts." in name]:
        if name.endswith("_scale_inv"):
            tensors.pop(name)
        else:
            tensors[name] = tensors[name].to(torch.bfloat16)


BROKEN: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "a code that is none": (
        coded(WEIGHT, (7, 9), 0x7F),
        rf"{WEIGHT} in .*model\.safetensors: expert 3 has a code that is no number",
    ),
    "a negative code that is none": (
        coded(WEIGHT, (7, 9), 0xFF),
        rf"{WEIGHT} in .*model\.safetensors: expert 3 has a code that is no number",
    ),
    "a scale that is NaN": (
        lambda t: t[SCALE][1, 1].fill_(float("nan")),
        rf"{SCALE} in .*model\.safetensors: expert 3 has a scale that is no number \(nan\)",
    ),
    "an infinite scale": (
        lambda t: t[SCALE][0, 0].fill_(float("inf")),
        rf"{SCALE} in .*: expert 3 has a scale that is no number \(inf\)",
    ),
    "an absurd scale": (
        lambda t: t[SCALE][0, 0].fill_(2.0**121),
        rf"{SCALE} in .*: expert 3 has a scale of 2\.658e\+36, whose weights torch\.bfloat16 lacks",
    ),
    "scales of another grid": (
        replaced(SCALE, lambda scale: scale[:1]),
        rf"{SCALE} in .* has the shape \(1, 2\) of F32, and scales of a weight of \(144, 160\) have \(2, 2\) of F32",
    ),
    "scales of another dtype": (
        replaced(SCALE, lambda scale: scale.to(torch.int32)),
        rf"{SCALE} in .* has the shape \(2, 2\) of I32, and scales of a weight of \(144, 160\) have \(2, 2\) of F32",
    ),
    "no scales": (
        without(SCALE),
        rf"{WEIGHT} in .*model\.safetensors has no weight_scale_inv beside it",
    ),
    "no weight": (
        without(WEIGHT),
        rf"{SCALE} in .*model\.safetensors has no weight beside it",
    ),
    "numbers in the place of codes": (
        replaced(WEIGHT, lambda codes: codes.to(torch.bfloat16)),
        rf"{SCALE} in .*model\.safetensors has no weight beside it",
    ),
    "numbers alone": (in_bf16, r"is stored as BF16, and the configuration's quantization_config says"),
    "a dense layer without scales": (
        without(f"{DENSE}.weight_scale_inv"),
        rf"{DENSE}\.weight in .*model\.safetensors has no weight_scale_inv beside it",
    ),
    "a dense layer of another grid": (
        replaced(f"{DENSE}.weight_scale_inv", lambda scale: scale[:1]),
        rf"{DENSE}\.weight_scale_inv in .* has the shape \(1, 1\) of F32",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("kept", [PLAIN_FORMAT, FP8_BLOCKS], ids=["plain", "fp8"])
def test_what_is_broken_is_refused_by_file_and_tensor(
    what: str, kept: ExpertFormat, blocks: Path, tmp_path: Path
) -> None:
    change, message = BROKEN[what]
    rewrite(blocks, change)
    with pytest.raises(CorruptCheckpoint, match=message):
        ensure_pack(resolve(str(blocks)), cache_dir=tmp_path, expert_format=kept)
    assert not list(tmp_path.glob("packs/*"))


@pytest.mark.parametrize("dense_as", ["auto", "expanded"])
@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_a_broken_dense_layer_is_refused(name: str, dense_as: str, blocks: Path) -> None:
    def change(tensors: Tensors) -> None:
        if name == "weight":
            tensors[f"{DENSE}.weight"].view(torch.uint8)[3, 3] = 0xFF
        else:
            tensors[f"{DENSE}.weight_scale_inv"][0, 0] = float("nan")

    rewrite(blocks, change)
    with pytest.raises(
        CorruptCheckpoint, match=rf"{DENSE}\.{name} in .*model\.safetensors has a (code|scale) that is no"
    ):
        load(resolve(str(blocks)), expert_format=FP8_BLOCKS, dense_as=dense_as)


def test_experts_of_another_width_are_refused(blocks: Path, tmp_path: Path) -> None:
    edit_json(blocks / "config.json", lambda config: config.update(moe_intermediate_size=136))
    for kept in (PLAIN_FORMAT, FP8_BLOCKS):
        with pytest.raises(CorruptCheckpoint, match=r"has the shape \(.*\) in the checkpoint and \(.*\) by its conf"):
            ensure_pack(resolve(str(blocks)), cache_dir=tmp_path, expert_format=kept)


def test_codes_that_the_configuration_does_not_know_are_refused(blocks: Path, tmp_path: Path) -> None:
    edit_json(blocks / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(UnsupportedModel, match=r"is stored as F8_E4M3, as .* no quantization_config that says how"):
        ensure_pack(resolve(str(blocks)), cache_dir=tmp_path)


NOT_SERVED: dict[str, tuple[dict[str, Any], str]] = {
    "other blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\], and \[128, 128\]"),
    "experts in FP4": ({"quant_method": "fp8", "expert_dtype": "fp4"}, "its experts are fp4"),
    "another FP8": ({"quant_method": "fp8", "fmt": "e5m2"}, "its codes are e5m2"),
    "int8": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 8}}}},
        "its weights are int of 8 bits",
    ),
    "two schemes": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {n: {"weights": {"type": "float", "num_bits": n}} for n in (4, 8)},
        },
        "several schemes",
    ),
    "groups": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "group"}}},
        },
        "its scales are by group",
    ),
}


@pytest.mark.parametrize("what", NOT_SERVED)
def test_other_settings_are_refused_by_name(what: str, numbers: Path, tmp_path: Path) -> None:
    settings, why = NOT_SERVED[what]
    folder = to_fp8(numbers, tmp_path / "model")
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=settings))
    with pytest.raises(UnsupportedModel, match=rf"is quantised \({re.escape(settings['quant_method'])}\), and .*{why}"):
        resolve(str(folder))


def test_mixtral_names_its_projections_otherwise(tmp_path: Path) -> None:
    source = save_random("mixtral", tmp_path / "numbers", dtype=torch.bfloat16, hidden_size=96, intermediate_size=64)
    checkpoint: Checkpoint = resolve(str(to_fp8(source, tmp_path / "model")))
    theirs = dequantized(checkpoint.folder, torch.bfloat16)
    pack = PackFile.open(ensure_pack(checkpoint, cache_dir=tmp_path, expert_format=FP8_BLOCKS))
    layer = ExpertPlan(checkpoint, torch.bfloat16, FP8_BLOCKS).layers[0]
    made = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in layer.tensors)
    FP8_BLOCKS.expand(layer, record_of(pack, 0, 5), made)
    prefix = "model.layers.0.block_sparse_moe.experts.5"
    assert torch.equal(made[0], torch.cat([theirs[f"{prefix}.w1.weight"], theirs[f"{prefix}.w3.weight"]]))
    assert torch.equal(made[1], theirs[f"{prefix}.w2.weight"])
    pack.close()


def test_a_power_that_is_no_number_is_refused(numbers: Path, tmp_path: Path) -> None:
    folder = rewrite(
        to_fp8(numbers, tmp_path / "model", "powers"), lambda tensors: tensors[SCALE].view(torch.uint8)[0, 1].fill_(255)
    )
    with pytest.raises(
        CorruptCheckpoint, match=rf"{SCALE} in .*model\.safetensors: expert 3 has a scale that is no number"
    ):
        ensure_pack(resolve(str(folder)), cache_dir=tmp_path)


LEFT_OUT: dict[str, dict[str, Any]] = {
    "blocks": {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp.experts"]},
    "autofp8": {"ignored_layers": ["lm_head", "model.layers.1.mlp.experts"]},
    "compressed-channels": {"ignore": ["lm_head", r"re:.*layers\.1\.mlp\.experts\.\d+\.\w+_proj$"]},
}
"""By kind, what says in ``quantization_config`` that the experts of a layer are numbers."""


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_experts_that_are_left_out_are_numbers_and_so_all_become_numbers(
    kind: str, numbers: Path, tmp_path: Path
) -> None:
    folder = to_fp8(numbers, tmp_path / "model", kind)
    plain = {name: value for name, value in all_tensors(numbers).items() if ".layers.1.mlp.experts." in name}
    theirs = dequantized(folder, torch.bfloat16) | plain

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
            del tensors[name]
        tensors.update(plain)

    rewrite(folder, change)
    with pytest.raises(CorruptCheckpoint, match=r"experts\.0\.\w+\.weight in .* is stored as BF16, and the config"):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(LEFT_OUT[kind]))
    checkpoint = resolve(str(folder))
    assert kept_format(checkpoint) is PLAIN_FORMAT
    with pytest.raises(InvalidConfig, match=r"layers\.1\.mlp\.experts.* is stored as numbers, and others are not"):
        kept_format(checkpoint, experts_as="stored")
    pack = PackFile.open(ensure_pack(checkpoint, cache_dir=tmp_path))
    for layer in (0, 1):
        for ours, expected in zip(record_of(pack, layer, 3), expert_of(theirs, layer, 3), strict=True):
            assert torch.equal(ours, expected)
    pack.close()
    load(checkpoint)


def test_numbers_of_a_layer_behind_the_last_do_not_expand_the_others(blocks: Path) -> None:
    """As in checkpoints whose layer that predicts several tokens ahead was not quantised."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.") and not name.endswith("_inv")]:
            tensors[name.replace(".2.", ".3.", 1)] = tensors[name].to(torch.bfloat16, copy=True)
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(160, 320, dtype=torch.bfloat16)

    checkpoint = resolve(str(rewrite(blocks, change)))
    assert checkpoint.config.num_hidden_layers == 3
    assert kept_format(checkpoint, experts_as="stored") is FP8_BLOCKS
    assert ExpertPlan(checkpoint, torch.bfloat16, FP8_BLOCKS).format_of("model.layers.2.mlp.experts") is FP8_BLOCKS
