"""A checkpoint as the GGUF file that llama.cpp reads, for the two families of the benchmark.

llama.cpp has Mixtral as its `llama` architecture with experts, and Qwen3-MoE as `qwen3moe`. All experts of a layer are
merged in three tensors. `llama` rotates neighbouring pairs of a head where the checkpoint pairs its halves, so rows of
query and key change places; `qwen3moe` pairs halves as the checkpoint does. The vocabulary is left out: the arms get
token ids.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from greenroom.checkpoints.pack_cache import default_cache_dir
from greenroom.core.errors import UnknownName, UnsupportedModel
from greenroom.core.files import synchronise
from greenroom.gguf.header import read_header

DTYPES = ("bf16", "f16")
_VERSION = 1  # raised when the same checkpoint is to give another file


@dataclass(frozen=True)
class Family:
    """What llama.cpp calls it. ``gate``, ``up``, ``down``: the checkpoint's names; ``experts``: of their parent."""

    architecture: str
    experts: str
    gate: str
    up: str
    down: str
    pairs_neighbours: bool
    head_norms: bool


FAMILIES = {
    "mixtral": Family("llama", "block_sparse_moe", "w1", "w3", "w2", pairs_neighbours=True, head_norms=False),
    "qwen3_moe": Family("qwen3moe", "mlp", "gate_proj", "up_proj", "down_proj", False, head_norms=True),
}


@dataclass(frozen=True)
class Target:
    """One tensor of the file. ``sources``: several are merged along a new first axis. ``heads``: rows of query or key
    change places, within each of so many heads. ``plain``: always float32, as llama.cpp keeps norms and routers.
    """

    name: str
    sources: tuple[str, ...]
    heads: int | None = None
    plain: bool = False


def family_of(config: Mapping[str, Any]) -> Family:
    """Raises UnknownName for a family that is not known here, UnsupportedModel for what llama.cpp does otherwise."""
    name = config["model_type"]
    if name not in FAMILIES:
        raise UnknownName("family", name, FAMILIES)
    if config.get("sliding_window") is not None:
        raise UnsupportedModel("sliding windows are not written to GGUF here")
    if name == "qwen3_moe" and not config["norm_topk_prob"]:
        raise UnsupportedModel("llama.cpp scales the picked experts of qwen3moe to 1; this model does not")
    return FAMILIES[name]


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def metadata(config: Mapping[str, Any]) -> dict[str, int | float | str]:
    """The keys that llama.cpp needs, as GGUF names them, without the architecture itself."""
    family = family_of(config)
    at = family.architecture
    rope = config.get("rope_parameters") or {}
    experts = config.get("num_local_experts") or config["num_experts"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    found: dict[str, int | float | str] = {
        f"{at}.vocab_size": config["vocab_size"],
        f"{at}.context_length": config["max_position_embeddings"],
        f"{at}.embedding_length": config["hidden_size"],
        f"{at}.block_count": config["num_hidden_layers"],
        f"{at}.feed_forward_length": inner,
        f"{at}.attention.head_count": config["num_attention_heads"],
        f"{at}.attention.head_count_kv": config["num_key_value_heads"],
        f"{at}.attention.key_length": head_dim(config),
        f"{at}.attention.value_length": head_dim(config),
        f"{at}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{at}.rope.dimension_count": head_dim(config),
        f"{at}.rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        f"{at}.expert_count": experts,
        f"{at}.expert_used_count": config["num_experts_per_tok"],
        "tokenizer.ggml.model": "no_vocab",
    }
    if family.head_norms:
        found[f"{at}.expert_feed_forward_length"] = inner
    return found


def targets(config: Mapping[str, Any]) -> list[Target]:
    """Every tensor of the file, in the order in which it is written."""
    family = family_of(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts = config.get("num_local_experts") or config["num_experts"]
    found = [
        Target("token_embd.weight", ("model.embed_tokens.weight",)),
        Target("output_norm.weight", ("model.norm.weight",), plain=True),
    ]
    if not config.get("tie_word_embeddings"):
        found.append(Target("output.weight", ("lm_head.weight",)))
    for layer in range(config["num_hidden_layers"]):
        into, out_of = f"blk.{layer}", f"model.layers.{layer}"
        moves = family.pairs_neighbours
        found += [
            Target(f"{into}.attn_norm.weight", (f"{out_of}.input_layernorm.weight",), plain=True),
            Target(f"{into}.ffn_norm.weight", (f"{out_of}.post_attention_layernorm.weight",), plain=True),
            Target(f"{into}.attn_q.weight", (f"{out_of}.self_attn.q_proj.weight",), heads if moves else None),
            Target(f"{into}.attn_k.weight", (f"{out_of}.self_attn.k_proj.weight",), kv_heads if moves else None),
            Target(f"{into}.attn_v.weight", (f"{out_of}.self_attn.v_proj.weight",)),
            Target(f"{into}.attn_output.weight", (f"{out_of}.self_attn.o_proj.weight",)),
            Target(f"{into}.ffn_gate_inp.weight", (f"{out_of}.{family.experts}.gate.weight",), plain=True),
        ]
        if family.head_norms:
            found += [
                Target(f"{into}.attn_{part}_norm.weight", (f"{out_of}.self_attn.{part}_norm.weight",), plain=True)
                for part in ("q", "k")
            ]
        for part, stored in (("gate", family.gate), ("up", family.up), ("down", family.down)):
            each = (f"{out_of}.{family.experts}.experts.{expert}.{stored}.weight" for expert in range(experts))
            found.append(Target(f"{into}.ffn_{part}_exps.weight", tuple(each)))
    return found


def neighbours_paired(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of ``weight[heads * d, inputs]``: each row of a head's first half before its partner in the second half."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def ensure(checkpoint: Path, dtype: str, *, progress: bool = True) -> Path:
    """The checkpoint's GGUF file in the cache, made first if it is not there. Raises UnknownName for the dtype."""
    if dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    path = default_cache_dir() / "gguf" / f"{_VERSION}-{checkpoint.parent.name}-{checkpoint.name}-{dtype}.gguf"
    if not path.exists():
        write(checkpoint, path, dtype, progress=progress)
    return path


def expert_bytes(path: Path) -> int:
    """Of all experts' matrices in a GGUF file."""
    return sum(tensor.nbytes for name, tensor in read_header(path).tensors.items() if "_exps." in name)


def write(checkpoint: Path, path: Path, dtype: str, *, progress: bool = True) -> None:
    """Write the file, whole or not at all; in memory is one layer's merged tensor at a time."""
    from gguf import GGUFWriter

    config = json.loads((checkpoint / "config.json").read_text())
    wanted = targets(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.stem}.", suffix=".partial", dir=path.parent))
    try:
        writer = GGUFWriter(folder / path.name, family_of(config).architecture)
        for key, value in metadata(config).items():
            _add(writer, key, value)
        with _Weights(checkpoint) as weights:
            kinds = [_kind(target, dtype) for target in wanted]
            for target, (item, quantization) in zip(wanted, kinds, strict=True):
                shape = weights.shape(target)
                writer.add_tensor_info(target.name, shape, item, int(np.prod(shape)) * item.itemsize, quantization)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for target, (item, _) in zip(tqdm(wanted, desc=f"GGUF {dtype}", disable=not progress), kinds, strict=True):
                writer.write_tensor_data(weights.read(target, item))
        writer.close()
        synchronise(folder / path.name)
        (folder / path.name).replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _add(writer: Any, key: str, value: int | float | str) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _kind(target: Target, dtype: str) -> tuple[np.dtype[Any], Any]:
    """How the numbers lie in memory (bfloat16 as its bits), and GGUF's name for it."""
    from gguf import GGMLQuantizationType

    if target.plain:
        return np.dtype(np.float32), GGMLQuantizationType.F32
    if dtype == "f16":
        return np.dtype(np.float16), GGMLQuantizationType.F16
    return np.dtype(np.uint16), GGMLQuantizationType.BF16


class _Weights:
    """The bfloat16 tensors of a checkpoint, whichever shard they lie in."""

    def __init__(self, checkpoint: Path) -> None:
        from safetensors import safe_open

        self._files: list[Any] = [safe_open(file, framework="pt") for file in sorted(checkpoint.glob("*.safetensors"))]
        self._file_of: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - no mapping

    def shape(self, target: Target) -> tuple[int, ...]:
        one = tuple(self._file_of[target.sources[0]].get_slice(target.sources[0]).get_shape())
        return (len(target.sources), *one) if len(target.sources) > 1 else one

    def read(self, target: Target, item: np.dtype[Any]) -> NDArray[Any]:
        parts = [self._converted(name, item) for name in target.sources]
        merged = np.stack(parts) if len(parts) > 1 else parts[0]
        return merged if target.heads is None else neighbours_paired(merged, target.heads)

    def _converted(self, name: str, item: np.dtype[Any]) -> NDArray[Any]:
        import torch

        tensor = self._file_of[name].get_tensor(name)
        if tensor.dtype is not torch.bfloat16:
            raise UnsupportedModel(f"{name} is {tensor.dtype}; only bfloat16 is written to GGUF here")
        if item == np.uint16:
            bits: NDArray[Any] = tensor.view(torch.uint16).numpy()
            return bits
        wide: NDArray[Any] = tensor.float().numpy().astype(item)
        return wide

    def __enter__(self) -> _Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._file_of.clear()
