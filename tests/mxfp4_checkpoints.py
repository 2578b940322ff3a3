"""gpt-oss checkpoints as they really ship: blocks of 4-bit numbers with 8-bit scales in the place of matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.random_checkpoints import edit_json, save_random, write_tokenizer

WEIGHTS = "model.safetensors"


def save_mxfp4(folder: Path, *, tokenizer: bool = False, **changes: Any) -> Path:
    """A random one, in one file. ``changes`` override its config; widths stay multiples of 32."""
    sizes = {"hidden_size": 64, "head_dim": 16} | changes
    save_random("gpt_oss", folder, dtype=torch.bfloat16, max_shard_size="1GB", **sizes)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, inner, outer = tensor.shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, (experts, outer, inner // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / WEIGHTS)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=settings))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of ``save_mxfp4``'s checkpoint, as a test's way to break it."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    return folder
