from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.checkpoints.shard_reader import ShardReader
from greenroom.coe.loading.architecture import Architecture, build, build_architectures, read_stored
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.loading.expert_checkpoint import read_expert
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from tests.random_experts import save_board, save_expert


def built(folder: Path, dtype: torch.dtype = torch.float32) -> Architecture:
    return build(read_expert(folder, folder.name), dtype)


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    tensors = load_file(folder / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_records_hold_counters_as_well(tmp_path: Path) -> None:
    architecture = built(save_expert("resnet", tmp_path / "one"), torch.bfloat16)
    dtypes = {spec.name.rpartition(".")[2]: spec.dtype for spec in architecture.layout.tensors}
    assert dtypes["num_batches_tracked"] == "int64"
    assert dtypes["running_var"] == dtypes["weight"] == "bfloat16"
    assert architecture.stored_as_is


def test_names_that_transformers_changes_are_changed(tmp_path: Path) -> None:
    """YOLOS' checkpoints name a tensor otherwise than the model does, so each expert goes through transformers."""
    first, other = (save_expert("yolos", tmp_path / f"{seed}", seed=seed) for seed in range(2))
    architecture = built(first)
    assert not architecture.stored_as_is
    checkpoint = read_expert(other, "other")
    with ShardReader() as reader:
        made = architecture.weights_of(checkpoint, read_stored(checkpoint, reader))
    direct = build(checkpoint, torch.float32)
    assert [tuple(one.shape) for one in made] == [spec.shape for spec in direct.layout.tensors]


def test_a_tensor_of_several_names_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    original = transformers.BertModel.__init__

    def tied(self: transformers.BertModel, *arguments: object, **options: object) -> None:
        original(self, *arguments, **options)
        layers = self.encoder.layer
        layers[1].output.dense = layers[0].output.dense

    folder = save_expert("bert_embedding", tmp_path / "one")
    monkeypatch.setattr(transformers.BertModel, "__init__", tied)
    architecture = built(folder)
    assert (
        "encoder.layer.0.output.dense.weight", "encoder.layer.1.output.dense.weight",
    ) in architecture.names  # fmt: skip
    assert len(architecture.layout.tensors) == len(architecture.names)
    kept = {spec.name for spec in architecture.layout.tensors}
    assert "encoder.layer.1.output.dense.weight" not in kept


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = change(save_expert("resnet", tmp_path / "one"), "classifier.1.weight", None)
    with pytest.raises(CorruptCheckpoint, match=r"one lacks 1 tensors of a ResNetForImage.*classifier\.1\.weight"):
        built(folder)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = change(save_expert("resnet", tmp_path / "one"), "classifier.1.weight", torch.zeros(3, 5))
    with pytest.raises(CorruptCheckpoint, match=r"in another shape: classifier\.1\.weight"):
        built(folder)


def test_counters_that_old_checkpoints_lack_are_not_missed(tmp_path: Path) -> None:
    folder = save_expert("resnet", tmp_path / "one")
    counter = next(name for name in load_file(folder / "model.safetensors") if name.endswith("num_batches_tracked"))
    architecture = built(change(folder, counter, None))
    assert counter in {spec.name for spec in architecture.layout.tensors}
    assert not architecture.stored_as_is


def test_a_class_that_is_not_known(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    config = tmp_path / "experts" / "turned" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["YoloV99ForObjectDetection"]}))
    message = r"board\.toml: experts\.turned: .* is a YoloV99ForObjectDetection .*does not know"
    with pytest.raises(UnsupportedModel, match=message):
        build_architectures(read_collaboration(file))


def test_a_checkpoint_of_a_dtype_that_is_not_served_is_named(tmp_path: Path) -> None:
    """Another --dtype helps, so that is said."""
    file = save_board(tmp_path)
    config = tmp_path / "experts" / "turned" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float64"}))
    message = r"board\.toml: experts\.turned\.dtype: 'float64' is not allowed; .* one of bfloat16, .* --dtype"
    with pytest.raises(InvalidConfig, match=message):
        build_architectures(read_collaboration(file))
    assert build_architectures(read_collaboration(file), "float32")


def test_a_dtype_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="dtype: 'int8' is not allowed; use auto or one of bfloat16, "):
        build_architectures(read_collaboration(save_board(tmp_path)), "int8")
