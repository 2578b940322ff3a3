"""Tiny random checkpoints of every family of MoE models that transformers' registry names, found by looking.

A family is a configuration class that transformers generates text with (``AutoModelForCausalLM``) and whose modelling
code has experts. Its own defaults are made small by the names that configurations use for the same thing; what that
does not know stands in ``OWN``.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from tests.random_checkpoints import randomise, write_tokenizer

EXPERTS = 16
SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"), 3),
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LINEAR = {"linear_head_dim": 8, "linear_num_heads": 4, "num_shared_experts": 1}
_INDEXED = {"index_topk": 8, "index_head_dim": 8, "index_n_heads": 2}
_INKLING = {
    "unpadded_vocab_size": 260, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 64, "rel_extent": 64, "d_rel": 8,
}  # fmt: skip
_GEMMA4 = {
    **SMALL, "enable_moe_block": True, "vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 8,
    "sliding_window": 64,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_LINEAR, "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 3},
    "beam": {"num_hidden_layers": 12, "n_group": 1, "topk_group": 1},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": 2}},
    "deepseek_v4": {"num_key_value_heads": 1, "q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2, "head_dim": 16,
                    "qk_rope_head_dim": 8, "hc_mult": 2, **_INDEXED},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {"sliding_window": 64, "shared_experts_intermediate_size": 24, "head_dim": 16, **_INDEXED},
    "doge": {"is_moe": True},
    "gemma4": {"text_config": {**_GEMMA4, "model_type": "gemma4_text"}, "vision_config": None, "audio_config": None},
    "gemma4_text": _GEMMA4,
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "shared_intermediate_size": 24,
                         "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "inkling2_loop_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling_text": _INKLING,
    "kimi_linear": {**_LINEAR, "num_experts_per_token": 3, "q_lora_rank": None},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "num_layers": 2, "moe_topk": 3},
    "qwen4_exp_text": {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
                       "linear_num_value_heads": 4, "shared_expert_intermediate_size": 24, "hc_count": 2,
                       "hc_lowrank": 8, "ple_embed_dim": 16, "ngram_vocab_size_base": 300, "split_ngram_parts": 2,
                       "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 8, "indexer_n_heads": 2,
                       "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2},
    "zaya": {"num_experts_per_tok": 1, "num_hidden_layers": 12, "router_hidden_size": 16},
}  # fmt: skip


SERVED = (
    "afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe",
    "granitemoe_swa", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "mellum", "mimo_v2_flash",
    "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "sarvam_mla",
    "sarvam_moe", "solar_open",
)  # fmt: skip
"""Their texts are those of transformers' own ``generate``."""

STATE, MORE, OWN_EXPERTS, NOT_FOUND, COMPOSITE = (
    "has layers with a running state",
    "keep more of a sequence than keys and values",
    "does not use transformers' experts interface",
    "the model is dense, or its experts are not where others have them",
    "it is a multimodal checkpoint, whose text model transformers runs by itself",
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bailing_hybrid", "deepseek_v4", "granitemoehybrid", "inkling2_loop_text", "inkling2_text", "inkling_text",
            "jamba", "kimi_linear", "lara_mini", "lfm2_moe", "minimax", "nemotron_h", "qwen3_5_moe_text", "qwen3_next",
            "qwen4_exp_text", "zaya",
        ),
        STATE,
    ),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), MORE),
    **dict.fromkeys(("dbrx", "jetmoe", "llama4_text", "longcat_flash"), OWN_EXPERTS),
    "doge": NOT_FOUND,
    **dict.fromkeys(("dots3_note", "llama4", "qwen3_5_moe", "qwen4_exp"), COMPOSITE),
}  # fmt: skip
"""With what the refusal says."""

_REASONS = {
    STATE: "layers with a running state, which the batch loop can not take back",
    MORE: "layers keep more of a sequence than keys and values",
    OWN_EXPERTS: "experts do not use transformers' experts interface",
    NOT_FOUND: "experts are not where others have them",
    COMPOSITE: "multimodal; the text model alone is another type",
}


def table() -> str:
    """What docs/architecture/checkpoints.md says of all of them."""
    rows: list[tuple[str, tuple[str, ...]]] = [("served, equal to `generate`", SERVED)]
    for said, reason in _REASONS.items():
        rows.append((f"refused: {reason}", tuple(name for name, why in REFUSED.items() if why == said)))
    return "\n".join(["| | families |", "| --- | --- |", *(f"| {kind} | {', '.join(names)} |" for kind, names in rows)])


@functools.cache
def registry() -> dict[str, str]:
    """Families by type, sorted, with the name of the class that generates."""
    found = {}
    for model_type in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[model_type]
        if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
            continue
        entry = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        model_class = entry[0] if isinstance(entry, tuple) else entry
        source = inspect.getsource(sys.modules[model_class.__module__])
        if re.search(r"class \w*(Experts\w*|M[oO]E\w*)\(nn\.Module", source):
            found[model_type] = model_class.__name__
    return dict(sorted(found.items()))


def tiny_config(model_type: str, **changes: Any) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    known = config_class().to_dict().keys() | inspect.signature(config_class.__init__).parameters.keys()
    small = SMALL | _LATENT if "kv_lora_rank" in known else SMALL
    return config_class(
        **{key: value for key, value in small.items() if key in known} | OWN.get(model_type, {}) | changes
    )


def save_tiny(model_type: str, folder: Path, **changes: Any) -> Path:
    """A random checkpoint with a tokenizer, as the family's own class saves it. ``changes`` override its config."""
    config = tiny_config(model_type, **changes)
    model = getattr(transformers, registry()[model_type])._from_config(config, dtype=torch.float32)
    randomise(model, seed=0)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
