"""What is a collaboration's own. Locks, damage and full disks: tests/unit/moe_loading/test_packing.py."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from greenroom.checkpoints import pack_cache
from greenroom.coe.computing.all_resident import resident_weights
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.experts.pack.pack_file import PackFile
from tests.random_experts import save_board, save_expert


def pack(file: Path, cache: Path, dtype: str = "auto") -> Path:
    collaboration = read_collaboration(file)
    return ensure_pack(collaboration, build_architectures(collaboration, dtype), cache)


def test_a_layer_an_expert(tmp_path: Path) -> None:
    path = pack(save_board(tmp_path), tmp_path / "cache")
    assert path.name.startswith("coe-")
    with contextlib.closing(PackFile.open(path)) as opened:
        opened.verify()
        layers = opened.manifest.layers
        weights = resident_weights(opened)
    assert [(layer.name, layer.experts) for layer in layers] == [("resistor", 1), ("chip", 1), ("turned", 1)]
    assert layers[0].layout == layers[1].layout != layers[2].layout
    for layer, own, name in zip(layers[:2], weights, ("resistor", "chip"), strict=False):
        stored = load_file(tmp_path / "experts" / name / "model.safetensors")
        for spec, tensor in zip(layer.layout.tensors, own, strict=True):
            assert torch.equal(tensor, stored[spec.name]), spec.name


def test_it_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_board(tmp_path)
    path = pack(file, tmp_path / "cache")
    for name in ("_write", "_digest"):
        monkeypatch.setattr(pack_cache, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    assert pack(file, tmp_path / "cache") == path


def test_a_changed_checkpoint_gives_another(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    before = pack(file, tmp_path / "cache")
    save_expert("resnet", tmp_path / "experts" / "chip", seed=9)
    after = pack(file, tmp_path / "cache")
    assert before != after
    save_expert("resnet", tmp_path / "experts" / "chip", seed=1)
    assert pack(file, tmp_path / "cache") == before


def test_each_dtype_has_its_own(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    paths = {dtype: pack(file, tmp_path / "cache", dtype) for dtype in ("auto", "float32", "bfloat16")}
    assert paths["auto"] == paths["float32"] != paths["bfloat16"]


def test_the_disk_that_it_needs_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = save_board(tmp_path)
    with caplog.at_level(logging.INFO, "greenroom.checkpoints.pack_cache"):
        path = pack(file, tmp_path / "cache")
    with contextlib.closing(PackFile.open(path)) as opened:
        kib = opened.manifest.record_bytes / 1024
    assert f"of {file}: it takes {kib:.3g} KiB of the" in caplog.text
