"""Checkpoints as GGUF files, written as llama.cpp's converter writes them: by the ``gguf`` package and its names.

What a file's codes mean is asked of that package too, and saved as a checkpoint in float32: the reference.
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
}
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen2_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
    },
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 16},
    "olmoe": {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
}
"""Changes to ``random_checkpoints``' configurations. Blocks are 32 wide, llama.cpp has no dense layers between, and in
OLMoE as many heads of keys as of queries."""

_HALVES = {  # where a block has numbers in half precision, and what they are to be for a weight of about 1
    "Q2_K": {80: 0.08, 82: 0.12},
    "Q3_K": {108: 0.03},
    "Q4_K": {0: 0.006, 2: 0.045},
    "Q5_K": {0: 0.003, 2: 0.0465},
    "Q6_K": {208: 0.0009},
    "IQ4_NL": {0: 0.015},
    "IQ4_XS": {0: 0.001},
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
_PART = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def coded(rows: NDArray[np.float32], kind: Kind) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """The bytes of ``rows[..., inputs]`` as ``kind``, and the numbers that these mean. Kinds that the package can not
    quantise to become random blocks of about the same size."""
    if kind in (Kind.F32, Kind.F16):
        stored = rows.astype(np.float32 if kind == Kind.F32 else np.float16)
        return stored, stored.astype(np.float32)
    if kind.name in _HALVES:
        numbers, nbytes = gguf.GGML_QUANT_SIZES[kind]
        random = np.random.default_rng(zlib.crc32(rows.tobytes()))
        blocks = random.integers(0, 256, (rows.size // numbers, nbytes), dtype=np.uint8)
        for at, value in _HALVES[kind.name].items():
            scales = random.uniform(0.5, 1.0, len(blocks)) * value / np.sqrt(rows.shape[-1])
            blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
        stored = blocks.reshape(*rows.shape[:-1], -1)
    else:
        stored = gguf.quantize(rows, kind)
    return stored, gguf.dequantize(stored, kind)


@dataclass
class _Writing:
    """Tensors of the file by name, and the reference's by theirs."""

    kind_of: Callable[[str], Kind]
    stored: dict[str, tuple[NDArray[Any], Kind]] = field(default_factory=dict)
    experts: dict[str, dict[int, NDArray[Any]]] = field(default_factory=dict)
    meant: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, rows: NDArray[np.float32], *, plain: bool = False) -> NDArray[np.float32]:
        kind = Kind.F32 if plain or rows.ndim == 1 else self.kind_of(name)
        data, numbers = coded(rows, kind)
        self.stored[name] = data, kind
        return numbers

    def add_expert(self, name: str, expert: int, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        data, numbers = coded(rows, self.kind_of(name))
        self.experts.setdefault(name, {})[expert] = data
        return numbers


def save_gguf(
    checkpoint: Path,
    path: Path,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    *,
    reference: Path | None = None,
    pre: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Callable[[dict[str, tuple[NDArray[Any], Kind]]], object] | None = None,
    shard_tensors: int = 0,
) -> Path:
    """Write ``checkpoint`` as a GGUF file whose matrices are of ``kind``, and what it means to the folder
    ``reference``.

    ``pre``: how its tokenizer splits text; None leaves the tokenizer out. ``metadata``: further keys, or others in
    their place, None for none; ``tensors`` changes what is written: ways to break it. ``shard_tensors``: as many in
    each of several files. Gives the first file.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    weights = {name: one for file in sorted(checkpoint.glob("*.safetensors")) for name, one in load_file(file).items()}
    writing = _Writing(kind if callable(kind) else lambda _: kind)
    for name, tensor in sorted(weights.items()):
        _write(writing, names, config, name, tensor.float().numpy())
    for name, experts in writing.experts.items():
        stacked = np.stack([experts[number] for number in range(len(experts))])
        writing.stored[name] = stacked, writing.kind_of(name)
    if reference is not None:
        shutil.copytree(checkpoint, reference, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: one.contiguous() for name, one in writing.meant.items()}, reference / "model.safetensors")
        (reference / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    if tensors is not None:
        tensors(writing.stored)
    said = _metadata(config, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]])
    said |= {} if pre is None else tokenizer_keys(checkpoint, pre)
    said |= metadata or {}
    _to_file(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]], said, writing.stored, shard_tensors)
    return path if not shard_tensors else sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]


def _write(writing: _Writing, names: Any, config: Mapping[str, Any], name: str, weight: NDArray[np.float32]) -> None:
    if (match := _EXPERT.fullmatch(name)) is not None:
        layer, expert, part = match.groups()
        numbers = writing.add_expert(f"blk.{layer}.ffn_{_PART[part]}_exps.weight", int(expert), weight)
    elif ".mlp.experts." in name:
        layer, part = name.split(".")[2], name.rpartition(".")[2]
        numbers = _write_gpt_oss(writing, f"blk.{layer}", part, weight)
    else:
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, f"the gguf package has no name for {name}"
        target += "" if target.endswith((".weight", ".bias")) else ".weight"
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        part = name.split(".")[-2]
        moved = config["model_type"] == "mixtral" and part in heads
        rows = _permuted(weight, heads[part]) if moved else weight
        rows = rows[0] if target.endswith("ffn_gate_inp_shexp.weight") else rows
        numbers = writing.add(target, rows, plain="ffn_gate_inp" in target)
        numbers = (_unpermuted(numbers, heads[part]) if moved else numbers).reshape(weight.shape)
    writing.meant[name] = torch.from_numpy(numbers.copy())


def _permuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """As llama.cpp's converter does for the architecture llama."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _unpermuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def _write_gpt_oss(writing: _Writing, at: str, part: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gate and up take turns in the checkpoint, and its matrices are ``[inputs, outputs]``."""

    def turned(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.ascontiguousarray(rows.swapaxes(-1, -2))

    match part:
        case "gate_up_proj":
            parts = [turned(weight[..., first::2]) for first in (0, 1)]
            named = zip(("gate", "up"), parts, strict=True)
            made = [turned(writing.add(f"{at}.ffn_{own}_exps.weight", one)) for own, one in named]
            return np.stack(made, axis=-1).reshape(weight.shape)
        case "gate_up_proj_bias":
            for own, first in (("gate", 0), ("up", 1)):
                writing.add(f"{at}.ffn_{own}_exps.bias", np.ascontiguousarray(weight[..., first::2]), plain=True)
            return weight
        case "down_proj":
            return turned(writing.add(f"{at}.ffn_down_exps.weight", turned(weight)))
        case "down_proj_bias":
            return writing.add(f"{at}.ffn_down_exps.bias", weight, plain=True)
    raise AssertionError(part)


def _metadata(config: Mapping[str, Any], at: str) -> dict[str, Any]:
    family = config["model_type"]
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    rope = config["rope_parameters"]
    said: dict[str, Any] = {
        f"{at}.context_length": config["max_position_embeddings"],
        f"{at}.embedding_length": config["hidden_size"],
        f"{at}.block_count": config["num_hidden_layers"],
        f"{at}.feed_forward_length": config["intermediate_size"],
        f"{at}.attention.head_count": config["num_attention_heads"],
        f"{at}.attention.head_count_kv": config["num_key_value_heads"],
        f"{at}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{at}.rope.freq_base": float(rope["rope_theta"]),
        f"{at}.expert_count": config.get("num_local_experts") or config["num_experts"],
        f"{at}.expert_used_count": config["num_experts_per_tok"],
        "general.quantization_version": 2,
    }
    if family in ("mixtral", "olmoe"):
        said |= {f"{at}.vocab_size": config["vocab_size"], f"{at}.rope.dimension_count": head}
    if family in ("qwen3_moe", "gpt_oss"):
        said |= {f"{at}.attention.key_length": head, f"{at}.attention.value_length": head}
    if family in ("qwen2_moe", "qwen3_moe", "gpt_oss"):
        said[f"{at}.expert_feed_forward_length"] = inner
    if family == "qwen2_moe":
        said[f"{at}.expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if family == "gpt_oss":
        said[f"{at}.attention.sliding_window"] = config["sliding_window"]
    if rope["rope_type"] == "yarn":
        said |= {
            f"{at}.rope.scaling.type": "yarn",
            f"{at}.rope.scaling.factor": float(rope["factor"]),
            f"{at}.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return said


def tokenizer_keys(folder: Path, pre: str) -> dict[str, Any]:
    """Of a folder with a byte-level ``tokenizer.json``."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    own = json.loads((folder / "tokenizer_config.json").read_text())
    vocabulary = dict(whole["model"]["vocab"]) | {one["content"]: one["id"] for one in whole["added_tokens"]}
    special = {one["content"]: one["special"] for one in whole["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: int(vocabulary[token]))
    kinds = [gguf.TokenType.NORMAL if token not in special else _kind(special[token]) for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    said: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
    }
    said |= {"tokenizer.ggml.merges": merges} if merges else {}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")):
        if own.get(name) is not None:
            said[f"tokenizer.ggml.{key}_token_id"] = vocabulary[own[name]]
    templates = folder / "chat_template.jinja"
    template = templates.read_text() if templates.exists() else own.get("chat_template")
    return said | ({} if template is None else {"tokenizer.chat_template": template})


def _kind(special: bool) -> gguf.TokenType:
    return gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED


def _to_file(
    path: Path, architecture: str, said: Mapping[str, Any], stored: Mapping[str, tuple[NDArray[Any], Kind]], shard: int
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=shard)
    for key, value in said.items():
        if value is not None:
            add_value(writer, key, value)
    for name, (data, kind) in stored.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def as_float32(path: Path, target: Path) -> Path:
    """The file's numbers, by the package's own dequantisers, as another file with the same metadata."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, value in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            add_value(writer, key, value.contents())
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        writer.add_tensor(
            tensor.name, np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def add_value(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
