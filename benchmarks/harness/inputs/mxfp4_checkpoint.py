"""A checkpoint like gpt-oss's, of random codes: what MXFP4 is measured on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import GptOssConfig

from benchmarks.harness.inputs.checkpoints import copy_tokenizer, drawn, kept, write_index, write_json

_BLOCK = 32
_SCALES = (120, 123)
"""From 2^-7 to 2^-5. With codes of any value, whose root mean square is 2.9, that is the spread of ``RandomMixtral``'s
matrices at 1,024 inputs."""


@dataclass(frozen=True)
class RandomGptOss:
    """48 experts of 22 MB as numbers in bf16, 5.9 MB as stored: as ``RandomMixtral``."""

    layers: int = 6
    experts: int = 8
    top_k: int = 2
    hidden: int = 1024
    intermediate: int = 3584
    heads: int = 16
    kv_heads: int = 16
    vocabulary: int = 2048
    max_positions: int = 1024
    seed: int = 0

    def config(self) -> dict[str, Any]:
        """config.json, as transformers has it for gpt-oss."""
        config = GptOssConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            num_local_experts=self.experts,
            num_experts_per_tok=self.top_k,
            max_position_embeddings=self.max_positions,
            rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
            tie_word_embeddings=False,
            dtype="bfloat16",
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ).to_dict()
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        settings = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        return {**config, "architectures": ["GptOssForCausalLM"], "quantization_config": settings}


def random_gpt_oss(model: RandomGptOss | None = None, *, progress: bool = True) -> Path:
    """The checkpoint's folder, with the bundled model's tokenizer."""
    model = model or RandomGptOss()
    return kept("random-gpt-oss", f"1 {model}", lambda folder: _write(model, folder, progress))


def _write(model: RandomGptOss, folder: Path, progress: bool) -> None:
    written: dict[str, dict[str, torch.Tensor]] = {}
    for number in tqdm(range(-1, model.layers), desc="random checkpoint", unit="shard", disable=not progress):
        tensors = _dense(model) if number < 0 else _layer(model, number)
        file = f"model-{number + 2:05}-of-{model.layers + 1:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        written[file] = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_index(folder, written)
    write_json(folder / "config.json", model.config())
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    copy_tokenizer(folder)
    os.sync()  # a benchmark that follows is not to wait for it


def _dense(model: RandomGptOss) -> dict[str, torch.Tensor]:
    matrix = (model.vocabulary, model.hidden)
    shapes = {"model.embed_tokens.weight": matrix, "model.norm.weight": (model.hidden,), "lm_head.weight": matrix}
    return {name: drawn(name, shape, model.seed) for name, shape in shapes.items()}


def _layer(model: RandomGptOss, layer: int) -> dict[str, torch.Tensor]:
    at, hidden, inner = f"model.layers.{layer}", model.hidden, model.intermediate
    kv = hidden // model.heads * model.kv_heads
    attention, mlp = f"{at}.self_attn", f"{at}.mlp"
    shapes = {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
        f"{attention}.q_proj.weight": (hidden, hidden),
        f"{attention}.k_proj.weight": (kv, hidden),
        f"{attention}.v_proj.weight": (kv, hidden),
        f"{attention}.o_proj.weight": (hidden, hidden),
        f"{mlp}.router.weight": (model.experts, hidden),
    }
    zeros = {
        f"{attention}.q_proj.bias": (hidden,),
        f"{attention}.k_proj.bias": (kv,),
        f"{attention}.v_proj.bias": (kv,),
        f"{attention}.o_proj.bias": (hidden,),
        f"{attention}.sinks": (model.heads,),
        f"{mlp}.router.bias": (model.experts,),
        f"{mlp}.experts.gate_up_proj_bias": (model.experts, 2 * inner),
        f"{mlp}.experts.down_proj_bias": (model.experts, hidden),
    }
    tensors = {name: drawn(name, shape, model.seed) for name, shape in shapes.items()}
    tensors |= {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in zeros.items()}
    generator = torch.Generator().manual_seed(model.seed + layer)
    for name, inputs, outputs in (("gate_up_proj", hidden, 2 * inner), ("down_proj", inner, hidden)):
        shape = (model.experts, outputs, inputs // _BLOCK)
        blocks = torch.randint(0, 256, (*shape, _BLOCK // 2), dtype=torch.uint8, generator=generator)
        tensors[f"{mlp}.experts.{name}_blocks"] = blocks
        tensors[f"{mlp}.experts.{name}_scales"] = torch.randint(*_SCALES, shape, dtype=torch.uint8, generator=generator)
    return tensors
