"""Checkpoints in codes of 4 bits as GPTQ, AWQ and compressed-tensors write them: made of plain ones, and read back.

Written and read from the layouts' published descriptions, by shifts of whole words, apart from what is tested.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.random_checkpoints import edit_json

WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LEAST = 2.0**-14
"""Of scales: some groups are all zeros."""


@dataclass(frozen=True)
class Kind:
    """``group``: -1 is all inputs. ``ordered``: groups are of inputs in an order, which the tensors tell."""

    method: str
    group: int = 32
    symmetric: bool = False
    ordered: bool = False
    version: int = 1
    scales: torch.dtype = torch.float16
    int8_zeros: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """``quantization_config``."""
        if self.method == "gptq":
            written = {} if self.version == 1 else {"checkpoint_format": "gptq_v2"}
            own = {"group_size": self.group, "desc_act": self.ordered, "sym": self.symmetric}
            return {"quant_method": "gptq", "bits": 4, **own, **written}
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group == -1 else "group",
            "group_size": None if self.group == -1 else self.group,
            "actorder": "group" if self.ordered else None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": ["lm_head", "re:.*mlp.gate$"],
        }


KINDS = {
    "gptq": Kind("gptq", symmetric=True),
    "gptq-asymmetric-v2": Kind("gptq", version=2),
    "gptq-act-order": Kind("gptq", ordered=True),
    "gptq-one-group": Kind("gptq", group=-1),
    "awq": Kind("awq"),
    "awq-bf16": Kind("awq", group=64, scales=torch.bfloat16),
    "packed": Kind("compressed-tensors", symmetric=True, scales=torch.bfloat16),
    "packed-asymmetric": Kind("compressed-tensors", scales=torch.bfloat16),
    "packed-int8-zeros": Kind("compressed-tensors", int8_zeros=True),
    "packed-channel": Kind("compressed-tensors", group=-1, symmetric=True),
    "packed-act-order": Kind("compressed-tensors", symmetric=True, ordered=True, scales=torch.bfloat16),
    "packed-small-groups": Kind("compressed-tensors", group=16),
    "packed-float-scales": Kind("compressed-tensors", scales=torch.float32),
}


def quantise(weight: torch.Tensor, kind: Kind, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes ``[outputs, inputs]``, scales and zero points ``[outputs, groups]``. ``groups``: of inputs."""
    count = int(groups.max()) + 1
    by_group = torch.stack([weight[:, groups == group].float() for group in range(count)], dim=1)
    if kind.symmetric:
        scales = (by_group.abs().amax(-1) / 7).clamp(min=LEAST)
        zeros = torch.full_like(scales, 8)
    else:
        low, high = by_group.amin(-1).clamp(max=0), by_group.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=LEAST)
        zeros = (-low / scales).round().clamp(1, 15)
    scales = scales.to(kind.scales)
    codes = (weight.float() / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    return codes.long(), scales, zeros.long()


def packed(codes: torch.Tensor, order: Iterable[int] = range(8)) -> torch.Tensor:
    """Eight neighbours along the last dimension to a word, the first of ``order`` in its lowest bits."""
    by_word = codes.long().view(*codes.shape[:-1], -1, 8)
    words = torch.zeros(by_word.shape[:-1], dtype=torch.int64)
    for place, which in enumerate(order):
        words |= by_word[..., which] << 4 * place
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def unpacked(words: torch.Tensor, order: Iterable[int] = range(8)) -> torch.Tensor:
    codes = torch.empty(*words.shape, 8, dtype=torch.int64)
    for place, which in enumerate(order):
        codes[..., which] = words.long() >> 4 * place & 15
    return codes.view(*words.shape[:-1], -1)


def encode(weight: torch.Tensor, kind: Kind, groups: torch.Tensor) -> Tensors:
    """The tensors that take the place of a linear layer's weights, by the ends of their names."""
    outputs, inputs = weight.shape
    codes, scales, zeros = quantise(weight, kind, groups)
    if kind.method == "gptq":
        stored = zeros - 1 if kind.version == 1 else zeros
        return {
            "qweight": packed(codes).t().contiguous(),
            "qzeros": packed(stored.t().contiguous()),
            "scales": scales.t().contiguous(),
            "g_idx": groups.to(torch.int32),
        }
    if kind.method == "awq":
        return {
            "qweight": packed(codes.t().contiguous(), AWQ_ORDER),
            "qzeros": packed(zeros.t().contiguous(), AWQ_ORDER),
            "scales": scales.t().contiguous(),
        }
    made = {
        "weight_packed": packed(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if kind.int8_zeros:
        made["weight_zero_point"] = (zeros - 8).to(torch.int8)
    elif not kind.symmetric:
        made["weight_zero_point"] = packed(zeros.t().contiguous()).t().contiguous()
    if kind.ordered:
        made["weight_g_idx"] = groups.to(torch.int32)
    return made


def decode(stored: Tensors, kind: Kind, dtype: torch.dtype) -> torch.Tensor:
    """The weights ``[outputs, inputs]``: multiplied in float64, and rounded to ``dtype``."""
    if kind.method == "gptq":
        codes = unpacked(stored["qweight"].t()).t()
        zeros = unpacked(stored["qzeros"]) + (kind.version == 1)
        scales, groups = stored["scales"], stored["g_idx"].long()
    elif kind.method == "awq":
        codes = unpacked(stored["qweight"], AWQ_ORDER)
        zeros, scales = unpacked(stored["qzeros"], AWQ_ORDER), stored["scales"]
        groups = torch.arange(len(codes)) // (len(codes) // len(scales))
    else:
        outputs, inputs = stored["weight_shape"].tolist()
        codes, scales = unpacked(stored["weight_packed"])[:, :inputs].t(), stored["weight_scale"].t()
        zeros = torch.full(scales.shape, 8)
        if (found := stored.get("weight_zero_point")) is not None:
            zeros = (found.long() + 8).t() if found.dtype is torch.int8 else unpacked(found.t())[:, :outputs]
        groups = torch.arange(inputs) // (inputs // len(scales))
        if "weight_g_idx" in stored:
            groups = stored["weight_g_idx"].long()
    numbers = (codes - zeros[groups]).double() * scales[groups].double()
    return numbers.t().to(dtype).contiguous()


HEAD = ("lm_head",)


def is_quantised(name: str, tensor: torch.Tensor, kind: Kind, left_out: tuple[str, ...] = HEAD) -> bool:
    """Whether tools quantise it: linear layers, but for routers, embeddings and, most of them, the head."""
    module, _, end = name.rpartition(".")
    left_out = ("embed_tokens", ".gate", "shared_expert_gate", "norm", *left_out)
    if end != "weight" or tensor.dim() != 2 or any(module.endswith(one) for one in left_out):
        return False
    outputs, inputs = tensor.shape
    return inputs % (8 if kind.group == -1 else kind.group) == 0 and inputs % 8 == 0 and outputs % 8 == 0


def groups_for(module: str, inputs: int, kind: Kind, *, same: bool = True) -> torch.Tensor:
    """Of each input. With an order they are the same for the layers that share their inputs, unless not ``same``."""
    size = inputs if kind.group == -1 else kind.group
    if not kind.ordered:
        return torch.arange(inputs) // size
    shared = module.replace("up_proj", "gate_proj").replace("w3", "w1") if same else module
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(hash_of(shared)))
    groups = torch.empty(inputs, dtype=torch.int64)
    groups[order] = torch.arange(inputs) // size
    return groups


def hash_of(text: str) -> int:
    return zlib.crc32(text.encode())


def save_int4(plain: Path, folder: Path, kind: Kind, *, same: bool = True, left_out: tuple[str, ...] = HEAD) -> Path:
    """The checkpoint ``plain`` in codes, in one file. ``left_out``: ends of names of layers that stay numbers."""
    tensors: Tensors = {}
    for name, tensor in load_all(plain).items():
        if is_quantised(name, tensor, kind, left_out):
            module = name.removesuffix(".weight")
            own = encode(tensor, kind, groups_for(module, tensor.shape[1], kind, same=same))
            tensors |= {f"{module}.{part}": value for part, value in own.items()}
        else:
            tensors[name] = tensor
    copy_small(plain, folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=kind.settings))
    return folder


def save_decoded(coded: Path, folder: Path, kind: Kind, dtype: torch.dtype) -> Path:
    """What ``save_int4`` made, with numbers of ``dtype`` in the place of codes."""
    tensors: Tensors = {}
    modules: dict[str, Tensors] = {}
    parts = {"qweight", "qzeros", "scales", "g_idx"}
    for name, tensor in load_file(coded / WEIGHTS).items():
        module, _, part = name.rpartition(".")
        if part in parts or part.startswith("weight_"):
            modules.setdefault(module, {})[part] = tensor
        else:
            tensors[name] = tensor.to(dtype)
    assert modules
    tensors |= {f"{module}.weight": decode(stored, kind, dtype) for module, stored in modules.items()}
    copy_small(coded, folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def unquantised(config: dict[str, Any]) -> None:
        del config["quantization_config"]
        config["dtype"] = str(dtype).removeprefix("torch.")

    edit_json(folder / "config.json", unquantised)
    return folder


def load_all(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def copy_small(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copy(file, folder / file.name)
    for file in source.glob("*.jinja"):
        shutil.copy(file, folder / file.name)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """Change the tensors of ``save_int4``'s checkpoint, as a test's way to break it."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def as_numbers(tensors: Tensors, module: str, numbers: torch.Tensor) -> None:
    """Store a linear layer as numbers."""
    for name in [name for name in tensors if name.startswith(f"{module}.")]:
        del tensors[name]
    tensors[f"{module}.weight"] = numbers


def set_quantization(folder: Path, **changes: Any) -> Path:
    """Change the settings of ``quantization_config``."""
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(changes))
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found
