"""Families that the code does not name work by the same path, or are refused by name with the list of those that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from greenroom.core.errors import UnsupportedModel
from greenroom.moe.architecture.families import PROVEN
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.families.pairs import logits, make_pair, prompts
from tests.random_checkpoints import randomise

SMALL: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save(folder: Path, config_class: str, model_class: str, **config: Any) -> Path:
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**SMALL, **config}))
    randomise(model, seed=0)
    model.save_pretrained(folder)
    return folder


ROUTED = {"num_experts_per_tok": 2}
OTHERS = {
    "transposed": ("AriaTextConfig", "AriaTextForCausalLM", {"moe_num_experts": 8, "moe_topk": 2}),
    "corrected": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**ROUTED, "num_local_experts": 8}),
    "dense first": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {
            **ROUTED,
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        }
        | {"n_group": 1, "topk_group": 1},
    ),
    "shared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**ROUTED, "num_local_experts": 8, "shared_intermediate_size": 16},
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_works_through_the_registry(tmp_path: Path, kind: str) -> None:
    config_class, model_class, config = OTHERS[kind]
    pair = make_pair(save(tmp_path / "model", config_class, model_class, **config), tmp_path / "cache")
    ids = prompts(2, 9)
    assert not pair.loaded.family.proven
    assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))
    assert [layer.experts for layer in pair.loaded.layers] == [8] * len(pair.loaded.layers)
    pair.source.masks = {0: np.ones((18, 8), dtype=bool)}
    with pytest.raises(UnsupportedModel, match=r"masking is proven for .*mixtral.* only, not for"):
        logits(pair, pair.loaded.model, ids)


REFUSED = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, "'llama' are not supported: the model is dense"),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**ROUTED, "num_local_experts": 8, "intermediate_size_mlp": 48},
        "'llama4_text' are not supported: Llama4TextExperts does not use transformers' experts interface",
    ),
    "jetmoe": (
        "JetMoeConfig",
        "JetMoeForCausalLM",
        {**ROUTED, "num_local_experts": 8, "kv_channels": 8},
        "'jetmoe' are not supported: JetMoeParallelExperts does not use transformers' experts interface",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(tmp_path: Path, kind: str) -> None:
    config_class, model_class, config, message = REFUSED[kind]
    checkpoint = resolve(str(save(tmp_path / "model", config_class, model_class, **config)))
    for refused in (lambda: load(checkpoint), lambda: ensure_pack(checkpoint, cache_dir=tmp_path / "cache")):
        with pytest.raises(UnsupportedModel, match=message) as caught:
            refused()
        assert all(family in str(caught.value) for family in PROVEN)
    assert not list((tmp_path / "cache").rglob("*.pack"))


def test_a_model_that_generates_nothing_is_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"'vit' are not supported: .*generates text"):
        load(resolve(str(tmp_path)))
