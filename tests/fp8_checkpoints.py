"""Checkpoints in FP8 as they are published: a weight in E4M3 beside its scales, and what transformers makes of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from tests.random_checkpoints import edit_json

LARGEST: Final = 448.0
BLOCK: Final = 128
NUMBERS: Final = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "block_sparse_moe.gate.weight")
"""In the names of what published checkpoints leave in bf16."""

Tensors = dict[str, torch.Tensor]


def _compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


KINDS: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        "weight_scale_inv",
        "block",
    ),
    "matrices": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        "weight_scale_inv",
        "tensor",
    ),
    "compressed-channels": (_compressed("channel"), "weight_scale", "channel"),
    "compressed-matrices": (_compressed("tensor"), "weight_scale", "tensor"),
    "compressed-blocks": (_compressed("block"), "weight_scale", "block"),
}
"""By name ``quantization_config``, the name of scales, and what one is of."""

LAYOUTS: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "minimax": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "float8_e4m3fn",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        "weight_scale_inv",
        "block",
    ),
    "powers": (
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "weight_scale_inv",
        "block",
    ),
    "autofp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "weight_scale",
        "tensor",
    ),
}  # fmt: skip
"""Others that mean the same: MiniMax-M2 has another name for the codes, ``scale_fmt`` ue8m0 has scales of 8 bits, and
AutoFP8 does not speak of blocks and has a scale a matrix."""


def to_fp8(source: Path, folder: Path, kind: str = "blocks", *, scales: torch.dtype = torch.float32) -> Path:
    """The checkpoint ``source`` in FP8, in one file."""
    settings, name_of_scales, strategy = (KINDS | LAYOUTS)[kind]
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    tensors = {}
    for name, tensor in all_tensors(source).items():
        if tensor.ndim != 2 or not name.endswith(".weight") or any(part in name for part in NUMBERS):
            tensors[name] = tensor
            continue
        scale = _scales(tensor.float(), strategy).to(scales)
        if kind == "powers":
            scale = torch.exp2(torch.log2(scale.float()).ceil()).to(torch.float8_e8m0fnu)
        codes = (tensor.float() / by_weight(scale, tensor.shape)).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name.removesuffix('weight')}{name_of_scales}": scale}
        if settings.get("activation_scheme") == "static":
            of = "input" if kind == "autofp8" else "activation"
            tensors[f"{name.removesuffix('weight')}{of}_scale"] = torch.tensor(1.0)
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=settings))
    return folder


def _scales(weight: torch.Tensor, strategy: str) -> torch.Tensor:
    outputs, inputs = weight.shape
    if strategy == "tensor":
        return (weight.abs().max() / LARGEST).reshape(())
    if strategy == "channel":
        return weight.abs().amax(dim=1, keepdim=True).clamp_(min=1e-6) / LARGEST
    rows, columns = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[:outputs, :inputs] = weight.abs()
    return padded.view(rows, BLOCK, columns, BLOCK).amax(dim=(1, 3)).clamp_(min=1e-6) / LARGEST


def by_weight(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if scale.ndim == 2 and scale.shape[1] == -(-shape[1] // BLOCK) and scale.shape[0] == -(-shape[0] // BLOCK):
        return scale.float().repeat_interleave(BLOCK, 0)[: shape[0]].repeat_interleave(BLOCK, 1)[:, : shape[1]]
    return scale.float()


def all_tensors(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def dequantized(folder: Path, dtype: torch.dtype) -> Tensors:
    """The checkpoint's tensors as transformers' own dequantiser makes them in float32, then in ``dtype``."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    _, name_of_scales, strategy = next(kind for kind in (KINDS | LAYOUTS).values() if kind[0] == settings)
    stored, numbers = all_tensors(folder), {}
    for name, tensor in stored.items():
        if tensor.dtype is torch.float8_e4m3fn:
            scale = stored[f"{name.removesuffix('weight')}{name_of_scales}"]
            scale = scale.float() if scale.dtype is torch.float8_e8m0fnu else scale
            block = [BLOCK, BLOCK] if strategy == "block" else None
            numbers[name] = _dequantize_fp8_weight(tensor, scale, block, torch.float32).to(dtype)
        elif not name.endswith(("_scale", "_scale_inv")):
            numbers[name] = tensor.to(dtype)
    return numbers


def save_dequantized(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The same model without quantisation."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    save_file(dequantized(source, dtype), folder / "model.safetensors")

    def change(config: dict[str, Any]) -> None:
        del config["quantization_config"]
        config["dtype"] = str(dtype).removeprefix("torch.")

    edit_json(folder / "config.json", change)
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of ``to_fp8``'s checkpoint, as a test's way to break it."""
    tensors = all_tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder
