from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, Transpose, WeightConverter

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.moe.loading import conversion
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.load_model import load
from tests.random_checkpoints import random_model, save_random

Tensors = dict[str, torch.Tensor]
W1 = "model.layers.1.block_sparse_moe.experts.5.w1.weight"


@pytest.fixture
def rewrite(tmp_path: Path) -> Callable[[str, Callable[[Tensors], object]], ExpertPlan]:
    """The plan of a random checkpoint whose tensors were changed."""

    def rewritten(family: str, change: Callable[[Tensors], object]) -> ExpertPlan:
        folder = save_random(family, tmp_path, max_shard_size="1GB")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return ExpertPlan(resolve(str(folder)), torch.float32)

    return rewritten


def rename(tensors: Tensors, old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


GRANITE = "model.layers.0.block_sparse_moe.input_linear.weight"
# family, what was done to its tensors, what the refusal must say
BROKEN: dict[str, tuple[str, Any, str]] = {
    "one expert's tensor": (
        "mixtral",
        lambda t: t.pop(W1),
        r"layers\.1\.mlp\.experts\.gate_up_proj has 7 of 8 experts in the checkpoint; missing: 5",
    ),
    "the last expert": (
        "qwen3_moe",
        lambda t: [t.pop(name) for name in list(t) if ".experts.7." in name],
        "has 7 of 8 experts in the checkpoint; missing: 7",
    ),
    "all of one projection": (
        "mixtral",
        lambda t: [t.pop(name) for name in list(t) if "layers.0" in name and ".w3." in name],
        r"nothing for .*w3",
    ),
    "a whole layer": (
        "olmoe",
        lambda t: [t.pop(name) for name in list(t) if "layers.2.mlp.experts" in name],
        r"the checkpoint lacks model\.layers\.2\.mlp\.experts\.gate_up_proj",
    ),
    "a shape": ("mixtral", lambda t: t.update({W1: torch.zeros(40, 32)}), "differ in shape"),
    "all shapes": (
        "mixtral",
        lambda t: t.update({name: torch.zeros(40, 32) for name in t if name.endswith(("w1.weight", "w3.weight"))}),
        r"gate_up_proj in .* has the shape \(80, 32\) in the checkpoint and \(96, 32\) by its configuration",
    ),
    "stacked experts": (
        "granitemoe",
        lambda t: t.update({GRANITE: t[GRANITE][:5].clone()}),
        r"has the shape \(5, 48, 32\), not 8 experts first",
    ),
    "an expert of switch": (
        "switch_transformers",
        lambda t: t.pop("decoder.block.1.layer.2.mlp.experts.expert_6.wo.weight"),
        "has 7 of 8 experts in the checkpoint; missing: 6",
    ),
    "twice": (
        "mixtral",
        lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(8, 32, 48)}),
        "stored twice, in two layouts",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_missing_or_contradicts_the_configuration(rewrite: Any, what: str) -> None:
    family, change, message = BROKEN[what]
    with pytest.raises(CorruptCheckpoint, match=message):
        rewrite(family, change)


def test_experts_stored_as_integers_are_refused(rewrite: Any) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{W1} is stored as I8, as quantised weights are"):
        rewrite("mixtral", lambda tensors: tensors.update({W1: tensors[W1].to(torch.int8)}))


def test_experts_that_can_not_be_told_apart_are_refused(rewrite: Any) -> None:
    with pytest.raises(UnsupportedModel, match="can not tell the experts apart"):
        rewrite("mixtral", lambda tensors: rename(tensors, ".experts.1.", ".experts.first."))


def test_checkpoints_of_the_base_model_alone_lack_their_head(rewrite: Any) -> None:
    """Experts are found under names without the prefix; the head is missed when the dense weights load."""

    def strip(tensors: Tensors) -> None:
        rename(tensors, "model.", "")
        del tensors["lm_head.weight"]

    plan = rewrite("mixtral", strip)
    assert len(plan.stored) == 3 * 8 * 3
    with pytest.raises(CorruptCheckpoint, match=r"lacks 1 dense tensors.*lm_head\.weight"):
        load(plan.checkpoint)


def test_what_belongs_to_no_model_is_left_alone(rewrite: Any) -> None:
    """As deepseek_v3's layer for multi-token prediction, which its model class does not have."""
    extra = {"model.layers.61.mlp.experts.0.up_proj.weight": torch.zeros(4, 4), "extra": torch.zeros(1)}
    plan = rewrite("deepseek_v3", lambda tensors: tensors.update(extra))
    assert not ({stored.name for stored in plan.stored} | plan.dense.keys()) & extra.keys()
    assert load(plan.checkpoint).dtype == torch.float32


MERGE = MergeModulelist(dim=0)


@pytest.mark.parametrize(
    ("operations", "separable"),
    [
        ([MERGE, Concatenate(dim=1)], True),
        ([Transpose(0, 1), MERGE, Concatenate(dim=2)], True),
        ([MERGE, Transpose(1, 2)], True),
        ([MERGE, Concatenate(dim=0)], False),
        ([MERGE, Transpose(0, 1)], False),
        ([MERGE, Interleave(dim=-2)], False),
        ([MergeModulelist(dim=1)], False),
    ],
)
def test_only_what_leaves_experts_apart_is_done_one_by_one(operations: list[Any], separable: bool) -> None:
    converter = WeightConverter(["a.*.x"], "b", operations)
    if separable:
        conversion._check_separable("family", converter, merges=True)
    else:
        with pytest.raises(UnsupportedModel, match="'family' are not supported: its "):
            conversion._check_separable("family", converter, merges=True)


def test_the_description_changes_with_whatever_decides_the_experts(tmp_path: Path) -> None:
    model = random_model("mixtral")
    model.save_pretrained(tmp_path)
    plan = ExpertPlan(resolve(str(tmp_path)), torch.float32)
    again = ExpertPlan(resolve(str(tmp_path)), torch.float32)
    other = ExpertPlan(resolve(str(tmp_path)), torch.bfloat16)
    assert plan.description() == again.description()
    assert "Concatenate(dim=1)" in plan.description()
    assert plan.description() != other.description()


def test_weights_that_are_only_put_together_are_known(tmp_path: Path) -> None:
    """What is known so wrongly would be packed in another order or type than transformers has it in."""
    folder = save_random("mixtral", tmp_path / "model", dtype=torch.bfloat16)
    plan = ExpertPlan(resolve(str(folder)), torch.bfloat16)
    recipes = {recipe.target: recipe for recipe in plan.recipes[0]}
    assert all(map(plan.joins, recipes.values()))
    turned = copy.deepcopy(recipes["gate_up_proj"])
    assert turned.converter is not None
    turned.converter.operations.append(Transpose(dim0=1, dim1=2))
    assert not plan.joins(turned)
    swapped = dataclasses.replace(recipes["gate_up_proj"], feeds=recipes["gate_up_proj"].feeds[::-1])
    assert not plan.joins(swapped), "the converter knows its inputs by their names"
    wide = ExpertPlan(resolve(str(folder)), torch.float32)
    assert not any(map(wide.joins, wide.recipes[0]))
