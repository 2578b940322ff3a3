"""The checkpoint that llama.cpp gets: every weight, under its names, in its order of rotation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from benchmarks.peers import gguf_file
from greenroom.core.errors import UnknownName, UnsupportedModel
from tests.random_checkpoints import save_random

gguf = pytest.importorskip("gguf", reason="gguf, which writes and reads the files, is not installed")
FAMILIES = {"mixtral": gguf.MODEL_ARCH.LLAMA, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE}


def _checkpoint(family: str, folder: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    save_random(family, folder, dtype=torch.bfloat16, **changes)
    return folder, json.loads((folder / "config.json").read_text())


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_the_checkpoint_is_written_once_under_a_name_of_the_architecture(
    family: str, tmp_path: Path
) -> None:
    folder, config = _checkpoint(family, tmp_path)
    targets = gguf_file.targets(config)
    sources = [source for target in targets for source in target.sources]
    assert sorted(sources) == sorted(_weights(folder))
    known = {
        gguf.TENSOR_NAMES[tensor].format(bid=layer) + ".weight"
        for tensor in gguf.MODEL_TENSORS[FAMILIES[family]]
        for layer in range(config["num_hidden_layers"])
    }
    assert {target.name for target in targets} <= known
    assert gguf_file.family_of(config).architecture == gguf.MODEL_ARCH_NAMES[FAMILIES[family]]


@pytest.mark.parametrize("dtype", gguf_file.DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_back_is_what_the_checkpoint_holds(family: str, dtype: str, tmp_path: Path) -> None:
    folder, config = _checkpoint(family, tmp_path / "checkpoint")
    gguf_file.write(folder, tmp_path / "model.gguf", dtype, progress=False)
    weights = _weights(folder)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert set(stored) == {target.name for target in gguf_file.targets(config)}
    for target in gguf_file.targets(config):
        tensor = stored[target.name]
        expected = torch.stack([weights[source] for source in target.sources]).float().numpy().squeeze()
        if target.heads is not None:
            expected = gguf_file.neighbours_paired(expected, target.heads)
        found = _numbers(tensor)
        assert found.shape == expected.shape
        tolerance = 6e-8 if dtype == "f16" and not target.plain else 0.0  # half of float16's smallest number
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=target.name)


def _numbers(tensor: Any) -> NDArray[np.float32]:
    shape = tuple(reversed(tensor.shape.tolist()))
    if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
        bits = np.ascontiguousarray(tensor.data).view(np.uint16).reshape(shape)
        wide: NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
        return wide
    numbers: NDArray[np.float32] = tensor.data.reshape(shape).astype(np.float32)
    return numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_metadata_says_what_the_configuration_does(family: str, tmp_path: Path) -> None:
    folder, config = _checkpoint(family, tmp_path / "checkpoint")
    gguf_file.write(folder, tmp_path / "model.gguf", "bf16", progress=False)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    at = gguf_file.family_of(config).architecture
    told = {
        name: fields[f"{at}.{name}"].contents()
        for name in ("block_count", "expert_count", "expert_used_count", "attention.head_count_kv", "rope.freq_base")
    }
    assert told == {
        "block_count": config["num_hidden_layers"],
        "expert_count": config.get("num_local_experts") or config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    assert fields["tokenizer.ggml.model"].contents() == "no_vocab"


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    _, config = _checkpoint("qwen3_moe", tmp_path, tie_word_embeddings=True)
    assert "output.weight" not in {target.name for target in gguf_file.targets(config)}


def test_rotating_neighbours_of_the_moved_rows_is_rotating_halves_of_the_rows_as_they_were() -> None:
    heads, size, position = 3, 8, 5
    rows = np.random.default_rng(0).normal(size=(heads * size, 4))
    angles = position / 10000.0 ** (np.arange(0, size, 2) / size)
    halves = rows.reshape(heads, 2, size // 2, 4)
    neighbours = gguf_file.neighbours_paired(rows, heads).reshape(heads, size // 2, 2, 4)

    def rotated(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.stack([first * cos - second * sin, first * sin + second * cos])

    np.testing.assert_array_equal(
        rotated(halves[:, 0], halves[:, 1]), rotated(neighbours[:, :, 0], neighbours[:, :, 1])
    )


def test_what_llama_cpp_would_compute_otherwise_is_refused(tmp_path: Path) -> None:
    _, config = _checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(UnsupportedModel, match="scales the picked experts"):
        gguf_file.targets({**config, "norm_topk_prob": False})
    with pytest.raises(UnsupportedModel, match="sliding"):
        gguf_file.targets({**config, "sliding_window": 16})
    with pytest.raises(UnknownName, match="mixtral, qwen3_moe"):
        gguf_file.targets({**config, "model_type": "olmoe"})
    with pytest.raises(UnknownName, match="bf16, f16"):
        gguf_file.ensure(tmp_path, "q4_0")


def test_a_file_that_can_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    folder, _ = _checkpoint("mixtral", tmp_path / "checkpoint")
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()
    with pytest.raises(KeyError):
        gguf_file.write(folder, tmp_path / "made" / "model.gguf", "bf16", progress=False)
    assert list((tmp_path / "made").iterdir()) == []
