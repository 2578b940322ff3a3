"""A GGUF file computes what the checkpoint computes that it means: logits to the bit, in any type, in any family."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.experts.pack.pack_file import PackFile
from greenroom.moe.architecture.moe_layers import model_class
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import LoadedMoE, attach, load
from greenroom.moe.loading.packing import ensure_pack
from tests.contract.families.pairs import align, prompts
from tests.contract.families.sources import ScriptedExperts
from tests.random_checkpoints import save_random

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
checkpoints = pytest.importorskip("tests.gguf_checkpoints")
Kind = gguf.GGMLQuantizationType

FAMILIES = tuple(checkpoints.ARCHITECTURES)
NARROW = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
WIDE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Types whose rows are multiples of 256."""


@dataclass
class Made:
    ours: LoadedMoE
    eager: Any
    pack: Path


def made(root: Path, family: str, kind: Any, dtype: str, **changes: Any) -> Made:
    """The file in ``dtype``, and transformers' model of the numbers that its codes mean."""
    folder = save_random(family, root / "model", dtype=torch.bfloat16, **{**checkpoints.SIZES[family], **changes})
    path = checkpoints.save_gguf(folder, root / "model.gguf", kind, reference=root / "reference")
    checkpoint = resolve(str(path))
    pack = ensure_pack(checkpoint, dtype, root / "cache")
    ours = load(checkpoint, dtype, products="torch")
    attach(ours, ScriptedExperts.at(pack))
    eager = model_class(ours.model.config).from_pretrained(
        root / "reference", dtype=ours.dtype, experts_implementation="eager"
    )
    align(eager)
    return Made(ours, eager.eval(), pack)


@torch.inference_mode()
def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids).logits
    return found


def check_equal(one: Made) -> None:
    align(one.ours.model)
    for ids in (prompts(3, 17), prompts(1, 5, seed=1)):
        ours, theirs = logits(one.ours.model, ids), logits(one.eager, ids)
        assert torch.equal(ours, theirs)
        rows = ours.float().flatten(0, 1)
        assert rows.std(dim=0).mean() > 0.1 * rows.std(), "a model that says one thing proves little"


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_checkpoint(tmp_path: Path, family: str, kind: str) -> None:
    check_equal(made(tmp_path, family, Kind[kind], "float32"))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_bfloat16(tmp_path: Path, family: str) -> None:
    one = made(tmp_path, family, Kind.BF16, "auto")
    assert one.ours.dtype is torch.bfloat16
    check_equal(one)


@pytest.mark.parametrize("kind", [*NARROW, *WIDE])
def test_every_type_that_is_served(tmp_path: Path, kind: str) -> None:
    widths = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256} if kind in WIDE else {}
    check_equal(made(tmp_path, "qwen3_moe", Kind[kind], "float32", num_hidden_layers=2, **widths))


def test_types_that_differ_from_tensor_to_tensor(tmp_path: Path) -> None:
    """As in a Q4_K_M file, where part of the layers and the output have more bits."""

    def kind(name: str) -> Any:
        wide = name == "output.weight" or zlib.crc32(name.encode()) % 2
        return Kind.Q6_K if wide else Kind.Q4_K

    check_equal(made(tmp_path, "qwen2_moe", kind, "float32", hidden_size=256, moe_intermediate_size=256,
                     shared_expert_intermediate_size=256))  # fmt: skip


def test_gpt_oss_as_it_is_shipped(tmp_path: Path) -> None:
    """Experts in MXFP4, all else in eight bits."""
    one = made(tmp_path, "gpt_oss", lambda name: Kind.MXFP4 if "_exps" in name else Kind.Q8_0, "auto")
    check_equal(one)


def test_rounded_to_bfloat16_it_is_the_checkpoint_in_bfloat16(tmp_path: Path) -> None:
    check_equal(made(tmp_path, "qwen3_moe", Kind.Q8_0, "bfloat16"))


def test_one_expert_is_one_run_of_bytes_of_the_file(tmp_path: Path) -> None:
    """What is packed is found where the file has it, and a pack is made once."""
    one = made(tmp_path, "olmoe", Kind.Q8_0, "auto")
    checkpoint = one.ours.checkpoint
    again = ensure_pack(checkpoint, "auto", tmp_path / "cache")
    assert again == one.pack
    pack = PackFile.open(one.pack)
    assert pack.manifest.dtype == "bfloat16"
    pack.close()
