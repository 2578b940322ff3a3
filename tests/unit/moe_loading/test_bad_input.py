"""What a checkpoint can have wrong, in each format that experts can stay in: refused by file and tensor, whatever the
experts and the dense layers are to be kept as. ``test_mxfp4.py``, ``test_fp8.py``, ``test_int4.py`` and the tests of
GGUF files have what only one of them can have wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from tests import fp8_checkpoints, int4_checkpoints
from tests.fp8_checkpoints import to_fp8
from tests.gguf_checkpoints import save_gguf
from tests.int4_checkpoints import save_int4
from tests.random_checkpoints import edit_json, save_random
from tests.stored_checkpoints import KINDS

Tensors = dict[str, torch.Tensor]
Blocks = dict[str, tuple[Any, Kind]]
EXPERT = "model.layers.1.mlp.experts.3.down_proj"
DENSE = "model.layers.0.self_attn.q_proj"
STACKED, OF_LAYER = "blk.1.ffn_down_exps.weight", "blk.0.attn_q.weight"
NAN, INFINITE, HUGE = float("nan"), float("inf"), 2.0**127


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(
        "qwen3_moe", tmp_path_factory.mktemp("plain") / "model", dtype=torch.bfloat16, hidden_size=256,
        moe_intermediate_size=256, num_hidden_layers=2, num_experts=4, head_dim=64,
    )  # fmt: skip


def refused(path: Path, cache: Path, match: str) -> None:
    """When it is packed and loaded as it is stored, and when all of it becomes numbers."""
    for kept in ("stored", "expanded"):
        with pytest.raises(CorruptCheckpoint, match=match) as raised:
            packed_and_loaded(path, cache, kept)
        assert re.search(r"model\.(safetensors|gguf)", str(raised.value)), "which file it is"
        if "experts" in match or "exps" in match:
            assert not list(cache.glob("packs/*.pack"))


def packed_and_loaded(path: Path, cache: Path, kept: str) -> None:
    checkpoint = resolve(str(path))
    own = kept_format(checkpoint, experts_as=kept)
    ensure_pack(checkpoint, cache_dir=cache, expert_format=own)
    load(checkpoint, expert_format=own, dense_as="auto" if kept == "stored" else "expanded")


FP8 = ("blocks", "matrices", "compressed-channels", "compressed-matrices", "compressed-blocks")
INT4 = {
    name: replace(int4_checkpoints.KINDS[name], scales=torch.bfloat16)
    for name in ("gptq", "gptq-act-order", "awq", "packed", "packed-channel")
}
"""In whose scales' dtype there is 2^127."""


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE, HUGE])
@pytest.mark.parametrize("module", [EXPERT, DENSE])
@pytest.mark.parametrize("kind", FP8)
def test_scales_of_fp8_that_are_no_numbers_or_huge(
    kind: str, module: str, value: float, plain: Path, tmp_path: Path
) -> None:
    scale = f"{module}.{fp8_checkpoints.KINDS[kind][1]}"

    def change(tensors: Tensors) -> None:
        tensors[scale].view(-1)[-1] = value

    folder = fp8_checkpoints.rewrite(to_fp8(plain, tmp_path / "model", kind), change)
    refused(folder, tmp_path, rf"{re.escape(scale)} in .* has a scale (that is no number|of 1\.701e\+38, whose)")


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE, HUGE])
@pytest.mark.parametrize("module", [EXPERT, DENSE])
@pytest.mark.parametrize("name", INT4)
def test_scales_of_int4_that_are_no_numbers_or_huge(
    name: str, module: str, value: float, plain: Path, tmp_path: Path
) -> None:
    kind = INT4[name]
    scale = f"{module}.{'weight_scale' if kind.method == 'compressed-tensors' else 'scales'}"

    def change(tensors: Tensors) -> None:
        tensors[scale].fill_(value)  # all, since of a huge one only some codes make too large a weight

    folder = int4_checkpoints.rewrite(save_int4(plain, tmp_path / "model", kind), change)
    refused(folder, tmp_path, rf"{re.escape(scale)} in .* has a scale (that is no finite number|of 1\.701e\+38, whose)")


def halves(*places: int) -> Mapping[str, tuple[int, bytes]]:
    bad = {"NaN": 0x7E00, "infinite": 0x7C00, "negative infinite": 0xFC00}
    return {f"{what} at {place}": (place, bits.to_bytes(2, "little")) for place in places for what, bits in bad.items()}


SCALES = {
    "q8_0": (Kind.Q8_0, halves(0)),
    "q4_k": (Kind.Q4_K, halves(0, 2)),
    "q6_k": (Kind.Q6_K, halves(208)),
    "mxfp4": (Kind.MXFP4, {"NaN": (0, b"\xff"), "huge": (0, b"\xfd" + b"\x77" * 16)}),
}
"""Of a block which bytes are the scale, and what must not stand there."""


@pytest.mark.parametrize("tensor", [STACKED, OF_LAYER])
@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, (_, bad) in SCALES.items() for what in bad])
def test_scales_of_gguf_that_are_no_numbers_or_huge(
    kind: str, what: str, tensor: str, plain: Path, tmp_path: Path
) -> None:
    of_file, bad = SCALES[kind]
    place, content = bad[what]

    def change(stored: Blocks) -> None:
        data, own = stored[tensor]
        changed = np.ascontiguousarray(data).copy()
        blocks = changed.reshape(-1, changed.shape[-1])
        # The third expert's first row, or the third row of a dense layer.
        row = 3 * changed.shape[1] if changed.ndim == 3 else 3
        blocks[row, place : place + len(content)] = np.frombuffer(content, np.uint8)
        stored[tensor] = changed, own

    path = save_gguf(
        plain, tmp_path / "model.gguf", lambda name: Kind.F32 if "ffn_gate_inp" in name else of_file, tensors=change
    )
    refused(path, tmp_path, rf"{re.escape(tensor)} in .*model\.gguf.*(no number|lacks|finite)")


@pytest.mark.parametrize("module", [r"model\.layers\.1\.mlp\.experts\.\d\.down_proj", re.escape(DENSE)])
@pytest.mark.parametrize("kind", [*FP8, *INT4])
def test_matrices_without_inputs(kind: str, module: str, plain: Path, tmp_path: Path) -> None:
    """Headers that agree with each other, and with the settings."""
    by_group = ("blocks", "compressed-blocks", "packed")

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if re.match(module, key)]:
            tensor, part = tensors[key], key.rpartition(".")[2]
            if part in ("qweight", "qzeros", "scales", "g_idx"):
                tensors[key] = tensor[:0].clone()
            elif part in ("weight", "weight_packed") or (part.startswith("weight_scale") and kind in by_group):
                tensors[key] = tensor[:, :0].clone()

    if kind in FP8:
        folder = fp8_checkpoints.rewrite(to_fp8(plain, tmp_path / "model", kind), change)
    else:
        folder = int4_checkpoints.rewrite(save_int4(plain, tmp_path / "model", INT4[kind]), change)
    refused(folder, tmp_path, rf"{module}\.\w+ in .* has the shape \((\d+, 0|0,)[^:]*: it is empty")


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "packed", "packed-asymmetric"])
@pytest.mark.parametrize("size", [48, 96, 512])
def test_groups_that_do_not_divide_the_inputs(name: str, size: int, plain: Path, tmp_path: Path) -> None:
    folder = save_int4(plain, tmp_path / "model", int4_checkpoints.KINDS[name])

    def change(config: dict[str, Any]) -> None:
        settings = config["quantization_config"]
        groups = settings.get("config_groups")
        (settings if groups is None else groups["group_0"]["weights"]).update(group_size=size)

    edit_json(folder / "config.json", change)
    with pytest.raises(
        CorruptCheckpoint, match=rf"(qweight|weight_packed) in .*model\.safetensors has 256 inputs, .* groups of {size}"
    ):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)


@pytest.mark.parametrize("name", ["gptq-act-order", "packed-act-order"])
@pytest.mark.parametrize("module", [EXPERT, DENSE])
@pytest.mark.parametrize("what", ["twice", "negative", "beyond", "far beyond"])
def test_orders_that_are_none(what: str, module: str, name: str, plain: Path, tmp_path: Path) -> None:
    part = f"{module}.{'weight_g_idx' if 'packed' in name else 'g_idx'}"

    def change(tensors: Tensors) -> None:
        groups = tensors[part]
        wrong = {"twice": (int(groups[7]) + 1) % 8, "negative": -2, "beyond": 8, "far beyond": 2**31 - 1}
        groups[7] = wrong[what]

    folder = int4_checkpoints.rewrite(save_int4(plain, tmp_path / "model", int4_checkpoints.KINDS[name]), change)
    refused(folder, tmp_path, rf"{re.escape(part)} in .* (is no order of the inputs|puts an input into group)")


@pytest.mark.parametrize("module", [EXPERT, DENSE])
def test_an_order_that_the_configuration_denies(module: str, plain: Path, tmp_path: Path) -> None:
    folder = save_int4(plain, tmp_path / "model", int4_checkpoints.KINDS["packed-act-order"])

    def change(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.endswith("weight_g_idx") and not key.startswith(module)]:
            del tensors[key]

    def deny(config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = None

    edit_json(int4_checkpoints.rewrite(folder, change) / "config.json", deny)
    with pytest.raises(CorruptCheckpoint, match=rf"{re.escape(module)}\.weight_g_idx in .* gives an order of inputs"):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)


SETTINGS: dict[str, dict[str, Any]] = {
    **{f"fp8 {name}": settings for name, (settings, _, _) in fp8_checkpoints.KINDS.items()},
    **{f"int4 {name}": int4_checkpoints.KINDS[name].settings for name in int4_checkpoints.KINDS},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_quantization_config_without_its_tensors(name: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    int4_checkpoints.copy_small(plain, folder)
    save_file(int4_checkpoints.load_all(plain), folder / "model.safetensors")
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=SETTINGS[name]))
    with pytest.raises(
        CorruptCheckpoint,
        match=r"experts\.\d\.\w+\.weight in .*model\.safetensors is stored as BF16, and the configuration's quant",
    ):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)


ALIKE = {
    "fp8 blocks": {"fp8 blocks"},
    "int4 gptq": {"int4 gptq", "int4 gptq-asymmetric-v2", "int4 gptq-act-order"},
    "int4 awq": {"int4 awq"},
    "int4 packed": {"int4 packed"},
}
"""A checkpoint, and the settings of which its tensors may be."""


@pytest.mark.parametrize(
    ("name", "said"), [(name, said) for name, alike in ALIKE.items() for said in SETTINGS if said not in alike]
)
def test_a_quantization_config_of_other_tensors(name: str, said: str, plain: Path, tmp_path: Path) -> None:
    method, kind = name.split()
    if method == "fp8":
        folder = to_fp8(plain, tmp_path / "model", kind)
    else:
        folder = save_int4(plain, tmp_path / "model", int4_checkpoints.KINDS[kind])
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=SETTINGS[said]))
    with pytest.raises((CorruptCheckpoint, UnsupportedModel), match=r"model\.layers\.\d.*proj"):
        packed_and_loaded(folder, tmp_path, "expanded")


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_ends_early(name: str, plain: Path, tmp_path: Path) -> None:
    path = KINDS[name].write(plain, tmp_path / "stored", None)
    weights = path if path.is_file() else next(iter(path.glob("*.safetensors")))
    whole = weights.read_bytes()
    for end in (len(whole) - 1, len(whole) // 2, 100):
        weights.write_bytes(whole[:end])
        with pytest.raises(CorruptCheckpoint, match=re.escape(weights.name)):
            resolve(str(path))
