"""Widening keeps the function and the routing, makes experts of the size asked for, and appears whole or not at all."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from greenroom.core.errors import CorruptCheckpoint, GreenroomError, InvalidConfig, UnsupportedModel
from greenroom.core.model_profile import dump_model_profile, load_model_profile
from greenroom.core.units import MIB
from greenroom.demo import widen as module
from greenroom.demo.widen import widen
from tests.unit.policies.model_profiles import model_profile, task_profile

_HIDDEN, _WIDTH, _LAYERS, _EXPERTS = 32, 128, 2, 4
_EXPERT_MIB = 0.05


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=_HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=_WIDTH,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("small") / "model"
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    return folder


def _load(folder: Path, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


@torch.no_grad()
def test_same_function_same_routing(small: Path, tmp_path: Path) -> None:
    widened = widen(small, tmp_path / "wide", _EXPERT_MIB, progress=False)
    ids = torch.randint(64, (3, 20), generator=torch.Generator().manual_seed(1))
    before = _load(small, torch.float32)(ids, output_router_logits=True)
    after = _load(widened.path, torch.float32)(ids, output_router_logits=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-4, atol=1e-4)
    for old, new in zip(before.router_logits, after.router_logits, strict=True):
        assert torch.equal(old.topk(2).indices, new.topk(2).indices)

    narrow, wide = _load(small, torch.bfloat16), _load(widened.path, torch.bfloat16)
    for row in ids:
        told = [m.generate(row[None], max_new_tokens=12, do_sample=False, pad_token_id=0) for m in (narrow, wide)]
        assert torch.equal(told[0], told[1])


def test_the_profile_comes_along_without_its_costs(small: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(small, source)
    even = [[1.0] * _EXPERTS] * _LAYERS
    profile = model_profile({"sort": task_profile(even)}, top_k=2, load_ms={1: 5.0})
    (source / "profile.json").write_bytes(dump_model_profile(profile))
    widened = widen(source, tmp_path / "wide", _EXPERT_MIB, progress=False)
    assert load_model_profile(widened.path / "profile.json") == msgspec.structs.replace(profile, costs=None)
    (source / "profile.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"profile\.json"):
        widen(source, tmp_path / "other", _EXPERT_MIB, progress=False)
    assert not (tmp_path / "other").exists()


def test_sizes_shards_and_copies(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 150_000)
    widened = widen(small, tmp_path / "wide", _EXPERT_MIB, progress=False)
    assert widened.width == 320  # 0.05 MiB / (3 × 32 × 2 B) = 273.07, rounded up to a multiple of 64
    assert widened.expert_bytes == 3 * _HIDDEN * 320 * 2 >= _EXPERT_MIB * MIB
    assert widened.experts == _LAYERS * _EXPERTS
    index = json.loads((widened.path / "model.safetensors.index.json").read_text())
    shards = sorted(widened.path.glob("*.safetensors"))
    assert len(shards) > 2
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    total = 0
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert index["weight_map"][name] == shard.name
                total += file.get_tensor(name).nbytes
    assert total == index["metadata"]["total_size"] == widened.total_bytes
    assert json.loads((widened.path / "config.json").read_text())["moe_intermediate_size"] == 320
    assert (widened.path / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'
    assert [entry.name for entry in tmp_path.iterdir()] == ["wide"]


def test_widening_the_widened_is_the_same_again(small: Path, tmp_path: Path) -> None:
    once = widen(small, tmp_path / "once", _EXPERT_MIB, progress=False)
    twice = widen(
        widen(small, tmp_path / "half", _EXPERT_MIB / 2, progress=False).path, tmp_path / "twice", _EXPERT_MIB
    )
    for name in sorted(file.name for file in once.path.glob("*.safetensors")):
        assert (once.path / name).read_bytes() == (twice.path / name).read_bytes()


def test_a_folder_with_something_in_it_is_refused_and_kept(small: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter").write_text("mine")
    with pytest.raises(InvalidConfig, match="not empty"):
        widen(small, tmp_path / "taken", _EXPERT_MIB, progress=False)
    assert (tmp_path / "taken" / "letter").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert widen(small, tmp_path / "empty", _EXPERT_MIB, progress=False).path.is_dir()


def test_smaller_than_it_is_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="already"):
        widen(small, tmp_path / "wide", 0.0001, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = 0

    def full(tensor: object) -> memoryview:
        nonlocal written
        written += 1
        if written > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return memoryview(b"")

    monkeypatch.setattr(module, "_padded", full)
    with pytest.raises(GreenroomError, match="No space left"):
        widen(small, tmp_path / "wide", _EXPERT_MIB, progress=False)
    assert written == 6
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(InvalidConfig, match="free"):
        widen(small, tmp_path / "wide", _EXPERT_MIB, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["truncated", "no weights", "wrong width", "not json"])
def test_a_damaged_source_is_refused(small: Path, tmp_path: Path, damage: str) -> None:
    source = Path(shutil.copytree(small, tmp_path / "source"))
    weights = source / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "no weights":
        weights.unlink()
    elif damage == "not json":
        (source / "config.json").write_text("{")
    else:
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 40}))
    with pytest.raises(CorruptCheckpoint):
        widen(source, tmp_path / "wide", _EXPERT_MIB, progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_other_families_are_refused_by_name(small: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(small, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "mixtral"}))
    with pytest.raises(UnsupportedModel, match=r"mixtral.*qwen3_moe"):
        widen(source, tmp_path / "wide", _EXPERT_MIB, progress=False)
