from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greenroom.coe.loading.expert_checkpoint import ExpertCheckpoint, InputKind, Task, read_expert
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from tests.random_experts import save_expert


def read(folder: Path) -> ExpertCheckpoint:
    return read_expert(folder, folder.name)


def edit(folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json") -> Path:
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "task", "takes"),
    [
        ("resnet", Task.IMAGE_CLASSIFICATION, InputKind.IMAGE),
        ("yolos", Task.OBJECT_DETECTION, InputKind.IMAGE),
        ("bert", Task.TEXT_CLASSIFICATION, InputKind.TEXT),
        ("bert_embedding", Task.EMBEDDING, InputKind.TEXT),
        ("resnet_embedding", Task.EMBEDDING, InputKind.IMAGE),
    ],
)
def test_what_it_gives_and_takes(tmp_path: Path, family: str, task: Task, takes: InputKind) -> None:
    found = read(save_expert(family, tmp_path / "one", labels=("a", "b")))
    assert (found.task, found.takes, found.dtype) == (task, takes, "float32")
    assert found.labels == (() if task is Task.EMBEDDING else ("a", "b"))
    assert found.weight_bytes == sum(one.nbytes for one in load_file(tmp_path / "one" / "model.safetensors").values())


def test_labels_without_names_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save_expert("bert", tmp_path / "one", labels=("a", "b"))
    assert read(edit(folder, lambda config: config.pop("id2label"))).labels == ("LABEL_0", "LABEL_1")


def test_experts_that_differ_in_values_and_names_have_one_architecture(tmp_path: Path) -> None:
    first = read(save_expert("resnet", tmp_path / "first", seed=0))
    other = read(save_expert("resnet", tmp_path / "other", seed=1, labels=("x", "y", "z")))
    assert first.architecture == other.architecture
    assert first.labels != other.labels


@pytest.mark.parametrize(
    "different",
    [
        {"labels": ("a", "b")},
        {"dtype": torch.bfloat16},
        {"hidden_act": "gelu"},
        {"depths": [1, 1]},
    ],
    ids=lambda different: next(iter(different)),
)
def test_experts_that_compute_differently_have_not(tmp_path: Path, different: dict[str, Any]) -> None:
    first = read(save_expert("resnet", tmp_path / "first"))
    other = read(save_expert("resnet", tmp_path / "other", **different))
    assert first.architecture != other.architecture


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def own_code(name: str) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda config: config.update(auto_map={"AutoModel": "code.Model"}), name)


def with_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda config: config.update(changes))


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "pickled weights": (pickled, UnsupportedModel, r"one has its weights as pickle .*convert it"),
    "own code": (own_code("config.json"), UnsupportedModel, r"config\.json of one names code of its own .*use a"),
    "a processor's own code": (own_code("preprocessor_config.json"), UnsupportedModel, r"preprocessor_config\.json of"),
    "another task": (with_config(architectures=["BertForMaskedLM"]), UnsupportedModel, r"BertForMaskedLM; served: …"),
    "no class": (with_config(architectures=None), UnsupportedModel, r"does not say of which class"),
    "quantised": (with_config(quantization_config={"quant_method": "gptq"}), UnsupportedModel, r"quantised \(gptq\)"),
    "grey images": (with_config(num_channels=1), UnsupportedModel, r"images of 1 channels"),
    "labels that skip a number": (with_config(id2label={"0": "a", "2": "b"}), CorruptCheckpoint, r"id2label of one"),
    "no processor": (
        lambda folder: (folder / "preprocessor_config.json").unlink(), CorruptCheckpoint,
        r"one has no preprocessor_config\.json, .*copy it",
    ),
    "no configuration": (
        lambda folder: (folder / "config.json").unlink(), CorruptCheckpoint, r"one has no config\.json"
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), CorruptCheckpoint, r"only safetensors"),
    "truncated weights": (truncated, CorruptCheckpoint, r"truncated"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_with_what_to_do(tmp_path: Path, what: str) -> None:
    spoil, error, message = REFUSED[what]
    folder = save_expert("resnet", tmp_path / "one")
    spoil(folder)
    with pytest.raises(error, match=message):
        read(folder)


def test_an_encoder_decoder_has_no_embedding(tmp_path: Path) -> None:
    folder = save_expert("bert_embedding", tmp_path / "one")
    edit(folder, lambda config: config.update(is_encoder_decoder=True))
    with pytest.raises(UnsupportedModel, match="an encoder-decoder"):
        read(folder)


def test_a_text_expert_needs_a_tokenizer(tmp_path: Path) -> None:
    folder = save_expert("bert", tmp_path / "one")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"one has no tokenizer"):
        read(folder)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    whole = save_expert("resnet", tmp_path / "whole")
    tensors = load_file(whole / "model.safetensors")
    names = sorted(tensors)
    (whole / "model.safetensors").unlink()
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, whole / file, metadata={"format": "pt"})
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read(whole).architecture == read(save_expert("resnet", tmp_path / "one")).architecture
