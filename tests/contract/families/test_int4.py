"""Checkpoints in codes of 4 bits give the logits of the same model with the numbers that the codes mean, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.moe.architecture.moe_layers import model_class
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.families.pairs import Pair, align, logits, prompts
from tests.contract.families.sources import ScriptedExperts
from tests.int4_checkpoints import KINDS, Kind, load_all, save_decoded, save_int4
from tests.random_checkpoints import save_random

WIDTHS: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 64},
    "phimoe": {"hidden_size": 64, "intermediate_size": 64},
    "olmoe": {"hidden_size": 64, "intermediate_size": 64},
    "qwen2_moe": {
        "hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96, "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96},
    "deepseek_v2": {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96, "kv_lora_rank": 32},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96, "kv_lora_rank": 32},
}  # fmt: skip


def pair_of(family: str, kind: Kind, root: Path, dtype: str) -> Pair:
    plain = save_random(family, root / "plain", dtype=torch.bfloat16, **WIDTHS[family])
    coded = save_int4(plain, root / "coded", kind)
    decoded = save_decoded(coded, root / "decoded", kind, getattr(torch, dtype))
    checkpoint = resolve(str(coded))
    source = ScriptedExperts.at(ensure_pack(checkpoint, dtype, root / "cache"))
    loaded = load(checkpoint, dtype, products="torch")
    attach(loaded, source)
    eager = model_class(checkpoint.config).from_pretrained(decoded, dtype=loaded.dtype, experts_implementation="eager")
    align(eager)
    return Pair(checkpoint, eager.eval(), loaded, source)


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        *(("qwen3_moe", name, "bfloat16") for name in KINDS),
        *((family, "gptq-act-order", "float32") for family in WIDTHS),
        *((family, "packed-asymmetric", "bfloat16") for family in WIDTHS if family != "qwen3_moe"),
        ("mixtral", "awq", "float16"),
    ],
)
def test_logits_are_those_of_the_decoded_model(family: str, name: str, dtype: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    pair = pair_of(family, kind, tmp_path, dtype)
    ids = prompts(2, 9)
    assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))
    modules = {
        stored.rpartition(".")[0] for stored in load_all(tmp_path / "coded") if stored.endswith(("scale", "scales"))
    }
    assert any(".experts." in module for module in modules)
    assert any("self_attn" in module for module in modules), "layers beside the experts are in codes too"


def test_a_head_in_codes_is_served(tmp_path: Path) -> None:
    kind = KINDS["gptq"]
    plain = save_random("qwen3_moe", tmp_path / "plain", dtype=torch.bfloat16, vocab_size=264, **WIDTHS["qwen3_moe"])
    coded = save_int4(plain, tmp_path / "coded", kind, left_out=())
    assert "lm_head.qweight" in load_all(coded)
    decoded = save_decoded(coded, tmp_path / "decoded", kind, torch.bfloat16)
    loaded, expanded = (load(resolve(str(coded)), dense_as=kept) for kept in ("auto", "expanded"))
    eager = model_class(expanded.checkpoint.config).from_pretrained(decoded, dtype=torch.bfloat16)
    assert torch.equal(expanded.model.lm_head.weight, eager.lm_head.weight)
    if loaded.native is not None:  # a row of the unit matrix gives an input's weights
        unit = torch.eye(eager.lm_head.in_features, dtype=torch.bfloat16)
        assert torch.equal(loaded.model.lm_head(unit), eager.lm_head.weight.T)


@pytest.mark.parametrize("apart", ["gate and up", "neither"])
def test_gates_and_ups_may_have_orders_of_their_own(apart: str, tmp_path: Path) -> None:
    kind = KINDS["gptq-act-order"]
    plain = save_random("mixtral", tmp_path / "plain", dtype=torch.bfloat16, **WIDTHS["mixtral"])
    coded = save_int4(plain, tmp_path / "coded", kind, same=apart == "neither")
    decoded = save_decoded(coded, tmp_path / "decoded", kind, torch.bfloat16)
    made = [
        ScriptedExperts.at(ensure_pack(resolve(str(folder)), cache_dir=tmp_path / "cache"))._weights
        for folder in (coded, decoded)
    ]
    assert all(
        torch.equal(ours, theirs)
        for layers in zip(*made, strict=True)
        for experts in zip(*layers, strict=True)
        for ours, theirs in zip(*experts, strict=True)
    )
