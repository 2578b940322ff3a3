"""What a GGUF file says of its model, and the files that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.checkpoints.weight_files import stored_tensors
from greenroom.core.errors import CorruptCheckpoint as Corrupt
from greenroom.core.errors import InvalidConfig
from greenroom.core.errors import UnsupportedModel as Unsupported
from greenroom.moe.loading.checkpoint import resolve, resolve_config
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.load_model import load
from greenroom.worker.model.checkpoint_summary import summarise
from tests.random_checkpoints import save_random

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
checkpoints = pytest.importorskip("tests.gguf_checkpoints")
Kind = gguf.GGMLQuantizationType

FAMILIES = tuple(checkpoints.ARCHITECTURES)
COMPUTED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "num_experts_per_tok", "tie_word_embeddings", "rope_parameters", "num_experts",
    "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob", "layer_types", "qkv_bias",
    "attention_bias", "decoder_sparse_step", "mlp_only_layers", "hidden_act", "swiglu_limit", "swiglu_alpha",
    "attention_dropout", "clip_qkv", "bos_token_id", "pad_token_id",
)  # fmt: skip
"""What of a configuration decides the answers."""


@dataclass
class Folders:
    """One random checkpoint of each family."""

    root: Path
    made: dict[str, Path] = field(default_factory=dict)

    def get(self, family: str) -> Path:
        if family not in self.made:
            sizes = checkpoints.SIZES[family]
            folder = self.root / family
            self.made[family] = save_random(family, folder, dtype=torch.bfloat16, tokenizer=True, **sizes)
        return self.made[family]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_is_the_checkpoints_own(folders: Folders, family: str, tmp_path: Path) -> None:
    folder = folders.get(family)
    path = checkpoints.save_gguf(folder, tmp_path / "model.gguf", Kind.BF16, pre="gpt-2")
    ours, original = resolve(str(path)).config, transformers.AutoConfig.from_pretrained(folder)
    assert type(ours) is type(original)
    for name in COMPUTED:
        assert getattr(ours, name, None) == getattr(original, name, None), name
    windows = [getattr(config, "sliding_window", None) or 0 for config in (ours, original)]
    assert windows[0] == windows[1]
    heads = [getattr(one, "head_dim", None) or one.hidden_size // one.num_attention_heads for one in (ours, original)]
    assert heads[0] == heads[1]
    assert ours.eos_token_id == [original.eos_token_id]
    assert load(resolve(str(path))).eos_token_ids == load(resolve(str(folder))).eos_token_ids
    plan = ExpertPlan(resolve(str(path)), torch.bfloat16)
    assert len(plan.stored) + len(plan.dense) == len(resolve(str(path)).tensors), "each tensor has a place"


def test_yarn_of_gpt_oss(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 64, "rope_theta": 150000.0,
    }  # fmt: skip
    folder = save_random("gpt_oss", tmp_path / "model", **checkpoints.SIZES["gpt_oss"], rope_parameters=rope)
    path = checkpoints.save_gguf(folder, tmp_path / "model.gguf")
    assert resolve(str(path)).config.rope_parameters == rope


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16"), ("MXFP4", "bfloat16")],
)
def test_what_is_computed_in(folders: Folders, kind: str, dtype: str, tmp_path: Path) -> None:
    path = checkpoints.save_gguf(folders.get("olmoe"), tmp_path / "model.gguf", Kind[kind])
    assert resolve(str(path)).stored_dtype == dtype


def test_a_summary_is_that_of_the_original(folders: Folders, tmp_path: Path) -> None:
    folder = folders.get("qwen3_moe")
    path = checkpoints.save_gguf(folder, tmp_path / "model.gguf", Kind.Q8_0)
    ours = summarise(resolve_config(str(path)), experts_as="expanded", dense_as="expanded")
    original = summarise(resolve_config(str(folder)))
    assert ours.checked
    for name in (
        "model_type",
        "dtype",
        "experts",
        "mean_expert_bytes",
        "dense_bytes",
        "kv_bytes_per_token",
        "max_model_len",
    ):
        assert getattr(ours, name) == getattr(original, name), name


def test_several_files_are_one_model_whichever_is_named(folders: Folders, tmp_path: Path) -> None:
    folder = folders.get("mixtral")
    whole = resolve(str(checkpoints.save_gguf(folder, tmp_path / "whole.gguf", pre="gpt-2")))
    checkpoints.save_gguf(folder, tmp_path / "parts.gguf", pre="gpt-2", shard_tensors=9)
    parts = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(parts) > 2
    for part in parts:
        found = resolve(str(part))
        assert found.tensors.keys() == whole.tensors.keys()
        assert found.shards == parts
        assert found.config.to_dict() == whole.config.to_dict()
    last = parts[-1].rename(tmp_path / "away.gguf")
    with pytest.raises(Corrupt, match=r"lacks 1 of \d+ shards, which have to be beside it: parts-"):
        resolve(str(parts[0]))
    with pytest.raises(Corrupt, match="shards are found by their names"):
        resolve(str(last))
    shutil.copy(parts[1], parts[-1])
    with pytest.raises(Corrupt, match="says that it is shard 2"):
        resolve(str(parts[0]))
    with pytest.raises(InvalidConfig, match="no such file"):
        resolve(str(tmp_path / "parts-00009-of-00002.gguf"))
    odd = parts[0].rename(tmp_path / "parts-00009-of-00002.gguf")
    with pytest.raises(Corrupt, match="named as shard 9 of 2"):
        resolve(str(odd))


def test_a_folder_of_gguf_files_names_one_of_them(folders: Folders, tmp_path: Path) -> None:
    path = checkpoints.save_gguf(folders.get("olmoe"), tmp_path / "model.gguf")
    with pytest.raises(Corrupt, match=f"to serve a GGUF file, name it: {path}"):
        resolve(str(tmp_path))
    shutil.copy(folders.get("olmoe") / "config.json", tmp_path)
    with pytest.raises(Corrupt, match=f"only safetensors are loaded; to serve a GGUF file, name it: {path}"):
        resolve(str(tmp_path))
    for name in ("Q4_K_M", "Q8_0-00001-of-00002", "Q8_0-00002-of-00002"):
        shutil.copy(path, tmp_path / f"{name}.gguf")
    named = ", ".join(str(tmp_path / f"{name}.gguf") for name in ("Q4_K_M", "Q8_0-00001-of-00002", "model"))
    with pytest.raises(Corrupt, match=rf"to serve a GGUF file, name one of them: {named}$"):
        resolve(str(tmp_path))
    for number in range(3):
        shutil.copy(path, tmp_path / f"other-{number}.gguf")
    with pytest.raises(Corrupt, match=r"name one of them: .*/other-1\.gguf and 1 more$"):
        resolve(str(tmp_path))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4995584848\n")
    with pytest.raises(Corrupt, match=r"it does not begin with GGUF: it is a pointer .* `git lfs pull`"):
        resolve(str(path))
    other = path.rename(tmp_path / "model.bin")
    with pytest.raises(InvalidConfig, match="no GGUF file by its name"):
        resolve(str(other))
    with pytest.raises(InvalidConfig, match="only hub repositories have revisions"):
        resolve(str(other.rename(path)), revision="main")


Broken = tuple[str, dict[str, Any], Callable[[dict[str, Any]], object] | None, type[Exception], str]
AT = "qwen3moe"


def _drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def _put(name: str, *shape: int) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: (np.zeros(shape, np.float32), Kind.F32)})


BROKEN: dict[str, Broken] = {
    "one that is not served": ("olmoe", {"general.architecture": "gemma"}, None, Unsupported, "'gemma'.*olmoe"),
    "a dense model": ("mixtral", {"llama.expert_count": 0}, None, Unsupported, "is a dense model"),
    "no width": ("qwen3_moe", {f"{AT}.embedding_length": None}, None, Corrupt, "has no .*embedding_length"),
    "no layers": ("qwen3_moe", {f"{AT}.block_count": 0}, None, Corrupt, "block_count .* from 1"),
    "a width that is a text": ("qwen3_moe", {f"{AT}.embedding_length": "64"}, None, Corrupt, "embedding_length"),
    "fewer layers than tensors": ("qwen3_moe", {f"{AT}.block_count": 2}, None, Corrupt, "blk.2.*left out"),
    "more layers than tensors": ("qwen3_moe", {f"{AT}.block_count": 4}, None, Corrupt, "lacks 1[0-9] tensors"),
    "billions of layers": ("qwen3_moe", {f"{AT}.block_count": 2**31 - 1}, None, Corrupt, "lacks"),
    "billions of experts": ("qwen3_moe", {f"{AT}.expert_count": 2**31 - 1}, None, Corrupt, "blk.0.*shape"),
    "billions of heads": ("qwen3_moe", {f"{AT}.attention.head_count": 2**31 - 1}, None, Corrupt, "shape"),
    "other heads": ("qwen3_moe", {f"{AT}.attention.head_count_kv": 1}, None, Corrupt, r"blk.0.attn_k.*\(16, 64\)"),
    "heads that differ by layer": ("qwen3_moe", {f"{AT}.attention.head_count_kv": [2, 2, 1]}, None, Corrupt, "layers"),
    "other widths for values": ("qwen3_moe", {f"{AT}.attention.value_length": 8}, None, Unsupported, "value_length"),
    "half a head rotated": ("mixtral", {"llama.rope.dimension_count": 8}, None, Unsupported, "dimension_count"),
    "other experts": ("qwen3_moe", {f"{AT}.expert_count": 7}, None, Corrupt, r"ffn_gate_inp.*\(7, 64\)"),
    "a step by which nothing rotates": ("olmoe", {"olmoe.rope.freq_base": 0.0}, None, Corrupt, "freq_base"),
    "an epsilon that is no number": (
        "olmoe", {"olmoe.attention.layer_norm_rms_epsilon": float("nan")}, None, Corrupt, "rms_epsilon",
    ),
    "a longer rotation": ("qwen3_moe", {f"{AT}.rope.scaling.type": "yarn"}, None, Unsupported, "scaling.type.*'yarn'"),
    "windows": ("mixtral", {"llama.attention.sliding_window": 16}, None, Unsupported, "sliding_window"),
    "sigmoids": ("qwen3_moe", {f"{AT}.expert_gating_func": 2}, None, Unsupported, "expert_gating_func"),
    "softcapping": ("qwen3_moe", {f"{AT}.attn_logit_softcapping": 30.0}, None, Unsupported, "softcapping"),
    "another vocabulary": ("qwen3_moe", {f"{AT}.vocab_size": 99}, None, Corrupt, "vocab_size .* 99 tokens"),
    "a lost tensor": ("olmoe", {}, _drop("blk.1.attn_q.weight"), Corrupt, "lacks 1 tensors.*blk.1.attn_q"),
    "lost experts": ("olmoe", {}, _drop("blk.2.ffn_up_exps.weight"), Corrupt, "blk.2.ffn_up_exps"),
    "no embeddings": ("olmoe", {}, _drop("token_embd.weight"), Corrupt, "token_embd"),
    "a tensor too many": ("olmoe", {}, _put("blk.0.attn_q.bias", 64), Unsupported, "blk.0.attn_q.bias"),
    "scaled rotations": ("mixtral", {}, _put("rope_freqs.weight", 8), Unsupported, "rope_freqs"),
    "experts one by one": ("mixtral", {}, _put("blk.0.ffn_gate.3.weight", 96, 64), Unsupported, "old converter"),
    "another shape": ("olmoe", {}, _put("blk.0.attn_k.weight", 32, 32), Corrupt, r"blk.0.attn_k.*\(32, 32\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_contradicts_itself_or_is_computed_otherwise_is_refused(
    folders: Folders, tmp_path: Path, case: str
) -> None:
    family, changes, tensors, kind, match = BROKEN[case]
    metadata = {key: value for key, value in changes.items() if key != "general.architecture"}
    architecture = changes.get("general.architecture")
    path = checkpoints.save_gguf(folders.get(family), tmp_path / "bad.gguf", metadata=metadata, tensors=tensors)
    if architecture is not None:
        path.write_bytes(path.read_bytes().replace(gguf_text("olmoe"), gguf_text(architecture), 1))
    with pytest.raises(kind, match=match) as raised:
        resolve(str(path))
    assert "bad.gguf" in str(raised.value)


def gguf_text(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


def test_a_type_that_is_not_served_is_refused_with_what_is(folders: Folders, tmp_path: Path) -> None:
    def ternary(tensors: dict[str, Any]) -> None:
        tensors["output.weight"] = np.zeros((260, 54), np.uint8), Kind.TQ1_0

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 32}
    folder = save_random("olmoe", tmp_path / "model", **sizes)
    path = checkpoints.save_gguf(folder, tmp_path / "odd.gguf", tensors=ternary)
    with pytest.raises(Unsupported, match=r"output.weight .* TQ1_0; served: F32, .*Q4_K.*llama-quantize"):
        resolve(str(path))


def test_tied_embeddings(tmp_path: Path) -> None:
    folder = save_random("qwen3_moe", tmp_path / "model", **checkpoints.SIZES["qwen3_moe"], tie_word_embeddings=True)
    assert "lm_head.weight" not in stored_tensors(folder, "model")
    path = checkpoints.save_gguf(folder, tmp_path / "model.gguf")
    loaded = load(resolve(str(path)))
    assert loaded.model.get_output_embeddings().weight is loaded.model.get_input_embeddings().weight
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


KEYS = (
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "block_count", "context_length", "embedding_length", "expert_count", "expert_feed_forward_length",
    "expert_used_count", "feed_forward_length", "rope.freq_base", "rope.scaling.type", "vocab_size",
)  # fmt: skip
VALUES = st.one_of(
    st.integers(0, 2**32 - 1), st.integers(0, 70), st.floats(width=32), st.booleans(), st.text(max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
def test_metadata_of_any_kind_are_served_or_refused(folders: Folders, tmp_path: Path, changes: dict[str, Any]) -> None:
    """And nothing is made as large as they say."""
    metadata = {f"{AT}.{key}": value for key, value in changes.items()}
    path = checkpoints.save_gguf(folders.get("qwen3_moe"), tmp_path / "any.gguf", metadata=metadata)
    found: int | str
    try:
        found = summarise(resolve_config(str(path)), experts_as="expanded").experts
    except (Corrupt, Unsupported) as error:
        found = str(error)
    assert found == 24 or "any.gguf" in str(found) or "config.json" in str(found)
