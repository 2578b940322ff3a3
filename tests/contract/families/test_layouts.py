"""The checkpoints of this suite look on disk as the families' real ones do, and other layouts load as well."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Mxfp4Config

from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from tests.contract.families.pairs import Pair, Pairs, logits, make_pair, prompts
from tests.mxfp4_checkpoints import save_mxfp4
from tests.random_checkpoints import FAMILIES, random_model

ONE_BY_ONE = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight"
MIXTRAL = r"model\.layers\.\d+\.block_sparse_moe\.experts\.\d+\.w[123]\.weight"
ON_DISK = {
    "mixtral": MIXTRAL,
    "phimoe": MIXTRAL,
    "qwen2_moe": ONE_BY_ONE,
    "qwen3_moe": ONE_BY_ONE,
    "olmoe": ONE_BY_ONE,
    "deepseek_v2": ONE_BY_ONE,
    "deepseek_v3": ONE_BY_ONE,
    "granitemoe": r"model\.layers\.\d+\.block_sparse_moe\.(input|output)_linear\.weight",
    "gpt_oss": r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj(_bias)?",
    "switch_transformers": r"(en|de)coder\.block\.\d+\.layer\.[12]\.mlp\.experts\.expert_\d+\.w[io]\.weight",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_as_the_real_ones_are(pairs: Pairs, family: str) -> None:
    checkpoint = pairs.get(family).checkpoint
    plan = ExpertPlan(checkpoint, torch.float32)
    experts = {stored.name for stored in plan.stored}
    assert experts == {name for name in checkpoint.tensors if re.fullmatch(ON_DISK[family], name)}
    assert set(plan.dense) == set(checkpoint.tensors) - experts
    assert len(checkpoint.shards) > 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_saved_as_it_is_in_memory(tmp_path: Path, family: str) -> None:
    folder = tmp_path / "model"
    model = random_model(family)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    same(make_pair(folder, tmp_path / "cache"))


def same(pair: Pair) -> None:
    ids = prompts(2, 9)
    assert torch.equal(logits(pair, pair.loaded.model, ids), logits(pair, pair.eager, ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mxfp4_is_dequantised_as_transformers_does(tmp_path: Path, dtype: str) -> None:
    folder = save_mxfp4(tmp_path / "model")
    checkpoint = resolve(str(folder))
    from greenroom.moe.loading.load_model import attach, load
    from greenroom.moe.loading.packing import ensure_pack
    from tests.contract.families.sources import ScriptedExperts

    loaded = load(checkpoint, dtype)
    source = ScriptedExperts.at(ensure_pack(checkpoint, dtype, tmp_path / "cache"))
    attach(loaded, source)
    reference: Any = GptOssForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        experts_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    pair = Pair(checkpoint, reference.eval(), loaded, source)
    assert torch.equal(source._weights[1][3][0], reference.model.layers[1].mlp.experts.gate_up_proj[3])
    same(pair)


def test_mxfp4_without_its_scales_is_refused(tmp_path: Path) -> None:
    folder = save_mxfp4(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"layers\.1\.mlp\.experts\.down_proj.*nothing for.*scales"):
        ExpertPlan(resolve(str(folder)), torch.bfloat16)
