"""Tiny random checkpoints of every proven family, in the layout that real ones of the family have on disk.

The models are transformers' own classes built from their real config classes. Weights are drawn wide enough that
routing and greedy tokens vary from prompt to prompt: with the library's own initialisation they hardly do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 260  # 256 bytes and four special tokens
EXPERTS = 8
TOP_K = 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MULTI_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": TOP_K,
    "routed_scaling_factor": 1.5,
}


@dataclass(frozen=True)
class Family:
    """How to build a tiny model of one family. ``moe_layers`` are the decoder layers that have experts."""

    name: str
    config_class: str
    model_class: str
    config: dict[str, Any] = field(default_factory=dict)
    moe_layers: int = 3
    experts: int = EXPERTS
    top_k: int = TOP_K
    decoder_only: bool = True


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "mixtral",
            "MixtralConfig",
            "MixtralForCausalLM",
            {"intermediate_size": 48, "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K},
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeConfig",
            "Qwen2MoeForCausalLM",
            {
                "intermediate_size": 48,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 32,
                "num_experts": EXPERTS,
                "num_experts_per_tok": 3,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [1],
            },
            moe_layers=2,
            top_k=3,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeConfig",
            "Qwen3MoeForCausalLM",
            {
                "intermediate_size": 48,
                "moe_intermediate_size": 24,
                "head_dim": 8,
                "num_experts": EXPERTS,
                "num_experts_per_tok": TOP_K,
                "norm_topk_prob": True,
            },
        ),
        Family(
            "olmoe",
            "OlmoeConfig",
            "OlmoeForCausalLM",
            {"intermediate_size": 24, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K},
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2Config",
            "DeepseekV2ForCausalLM",
            {**_MULTI_LATENT, "topk_method": "greedy", "n_group": None, "topk_group": None},
            moe_layers=2,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            {**_MULTI_LATENT, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0},
            moe_layers=2,
        ),
        Family(
            "gpt_oss",
            "GptOssConfig",
            "GptOssForCausalLM",
            {
                "intermediate_size": 32,
                "head_dim": 8,
                "num_local_experts": EXPERTS,
                "num_experts_per_tok": TOP_K,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        Family(
            "granitemoe",
            "GraniteMoeConfig",
            "GraniteMoeForCausalLM",
            {
                "intermediate_size": 24,
                "num_local_experts": EXPERTS,
                "num_experts_per_tok": TOP_K,
                "embedding_multiplier": 2.0,
                "logits_scaling": 2.0,
                "residual_multiplier": 0.7,
                "attention_multiplier": 0.35,
            },
        ),
        Family(
            "phimoe",
            "PhimoeConfig",
            "PhimoeForCausalLM",
            {"intermediate_size": 24, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "lm_head_bias": True},
        ),
        Family(
            "switch_transformers",
            "SwitchTransformersConfig",
            "SwitchTransformersForConditionalGeneration",
            {
                "vocab_size": VOCAB_SIZE,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 48,
                "num_layers": 4,
                "num_sparse_encoder_layers": 2,
                "num_decoder_layers": 4,
                "num_sparse_decoder_layers": 2,
                "num_heads": 4,
                "num_experts": EXPERTS,
                "expert_capacity": 5,
                "dropout_rate": 0.0,
                "pad_token_id": 0,
                "eos_token_id": 2,
                "decoder_start_token_id": 0,
            },
            moe_layers=4,
            top_k=1,
            decoder_only=False,
        ),
    )
}
DECODER_ONLY = tuple(name for name, family in FAMILIES.items() if family.decoder_only)


def random_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of the family; ``changes`` override its config."""
    family = FAMILIES[name]
    base = {} if name == "switch_transformers" else _COMMON
    config = getattr(transformers, family.config_class)(**{**base, **family.config, **changes})
    model = getattr(transformers, family.model_class)(config)
    randomise(model, seed)
    return model.to(dtype).eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter (and persistent buffer of a router) values under which layers and experts really differ."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
        elif isinstance(value, torch.nn.Parameter):
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                value.copy_(1 + 0.1 * noise)
            elif value.dim() < 2:
                value.copy_(0.1 * noise)
            else:
                value.copy_(noise * (1.5 / value.shape[-1] ** 0.5))


def wide_heads(family: str) -> dict[str, Any]:
    """Changes after which a head is as wide as real ones are at least, 32: what compiled attention needs."""
    return {"hidden_size": 128} | ({"head_dim": 32} if "head_dim" in FAMILIES[family].config else {})


def save_random(
    name: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tokenizer: bool = False,
    max_shard_size: str = "60KB",
    **changes: Any,
) -> Path:
    """Write a random checkpoint of the family in several shards; returns ``folder``."""
    model = random_model(name, seed=seed, dtype=dtype, **changes)
    model.generation_config.do_sample = False
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer that covers the models' whole vocabulary, with a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate(special)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    tokenizer.save_pretrained(folder)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a JSON file of a checkpoint, as a test's way to break it."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
