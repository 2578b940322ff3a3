from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM, OlmoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import load
from tests.random_checkpoints import edit_json, save_random


def test_nothing_of_transformers_is_changed(folder: Path) -> None:
    before = (dict(vars(MixtralForCausalLM)), set(MixtralForCausalLM.__subclasses__()))
    loaded = load(resolve(str(folder)))
    kept = dict(vars(MixtralForCausalLM))
    for cached in ("_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value"):
        kept.pop(cached, None)
        before[0].pop(cached, None)
    assert type(loaded.model) is MixtralForCausalLM
    assert kept == before[0]
    whole = MixtralForCausalLM.from_pretrained(folder)
    assert whole.model.layers[0].mlp.experts.down_proj.shape == (8, 32, 48)
    assert whole.config._experts_implementation != loaded.model.config._experts_implementation
    assert "greenroom" in ALL_EXPERTS_FUNCTIONS


def test_models_loaded_by_threads_at_once(folder: Path, tmp_path: Path) -> None:
    """Of different families and dtypes: what they share must not leak from one to the other."""
    other = save_random("olmoe", tmp_path / "olmoe", dtype=torch.float32)
    wanted = [(folder, MixtralForCausalLM, torch.bfloat16), (other, OlmoeForCausalLM, torch.float32)] * 3
    found: dict[int, Any] = {}
    gate = threading.Barrier(len(wanted))

    def one(number: int, path: Path) -> None:
        checkpoint = resolve(str(path))
        gate.wait(30)
        found[number] = load(checkpoint).model

    threads = [threading.Thread(target=one, args=(number, path)) for number, (path, _, _) in enumerate(wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(wanted)
    for number, (_, model_class, dtype) in enumerate(wanted):
        assert type(found[number]) is model_class
        assert {parameter.dtype for parameter in found[number].parameters()} == {dtype}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32", "float16"])
def test_the_dtype_is_the_callers_choice(folder: Path, dtype: str) -> None:
    loaded = load(resolve(str(folder)), dtype)
    expected = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
    assert loaded.dtype == loaded.model.dtype == expected


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidConfig, match="dtype: 'int8' is not allowed"):
        load(resolve(str(folder)), "int8")


def test_dense_weights_are_the_processs_own(folder: Path) -> None:
    """Not pages of the checkpoint, which may be replaced while the model serves."""
    model = load(resolve(str(folder))).model
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for shard in folder.glob("*.safetensors"):
        shard.write_bytes(bytes(shard.stat().st_size))
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def spoil(folder: Path, name: str, change: Any) -> None:
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file(tensors, shard, metadata={"format": "pt"})


def test_a_dense_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    save_random("mixtral", tmp_path, max_shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"lacks 1 dense .*model\.layers\.1\.self_attn\.q_proj\.weight"):
        load(resolve(str(tmp_path)))


def test_a_dense_tensor_of_another_shape_is_named(folder: Path) -> None:
    spoil(folder, "model.norm.weight", lambda tensor: tensor[:5].clone())
    with pytest.raises(CorruptCheckpoint, match=r"another shape: .*model\.norm\.weight"):
        load(resolve(str(folder)))


def test_ends_are_those_of_the_generation_settings(folder: Path) -> None:
    edit_json(folder / "generation_config.json", lambda settings: settings.update(eos_token_id=[7, 9]))
    assert load(resolve(str(folder))).eos_token_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    assert load(resolve(str(folder))).eos_token_ids == (2,)


def test_generation_settings_that_can_not_be_read_are_refused(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"generation_config\.json of .* is not valid"):
        load(resolve(str(folder)))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    save_random("granitemoe", tmp_path, tie_word_embeddings=True)
    model = load(resolve(str(tmp_path))).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
