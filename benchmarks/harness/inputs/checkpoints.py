"""The checkpoints that the benchmarks run on, made once and kept in the cache folder."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from tqdm import tqdm

from greenroom.checkpoints.pack_cache import default_cache_dir
from greenroom.demo import bundled_model_path
from greenroom.demo.widen import widen

EXPERT_MIB = 11.0
"""Size of a widened expert at least."""

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_SPREAD = 1.5
"""Standard deviation of a matrix, times the root of its inputs: routing then differs from token to token."""


@dataclass(frozen=True)
class RandomMixtral:
    """A Mixtral of random weights: routing as good as random, the worst case for a cache. 48 experts of 22 MB."""

    layers: int = 6
    experts: int = 8
    top_k: int = 2
    hidden: int = 1024
    intermediate: int = 3584
    heads: int = 16
    kv_heads: int = 16
    vocabulary: int = 2048
    max_positions: int = 1024
    seed: int = 0

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * 2

    def config(self) -> dict[str, Any]:
        """config.json, as transformers has it for Mixtral."""
        return {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "dtype": "bfloat16",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


LARGE_RANDOM = RandomMixtral(layers=12, experts=128, top_k=8, hidden=2048, intermediate=768, heads=16, kv_heads=4)
"""As many experts a layer as large, and as many picked, as Qwen3-30B-A3B has. 1,536 experts of 9 MiB: 13.5 GiB."""


LONG_RANDOM = RandomMixtral(kv_heads=4, max_positions=16_384)
"""For prompts of thousands of tokens. Four query heads share a key head, as real models of such contexts have it."""


def random_of_size(expert_mib: float) -> RandomMixtral:
    """With experts of about this size, their width a multiple of 64. 21 MiB is the default's 3584."""
    row = 3 * RandomMixtral().hidden * 2
    return RandomMixtral(intermediate=max(64, round(expert_mib * 2**20 / row / 64) * 64))


def widened(expert_mib: float = EXPERT_MIB) -> Path:
    """The bundled model with experts of a real model's size."""
    content = xxhash.xxh3_64_hexdigest((bundled_model_path() / "model.safetensors").read_bytes())
    folder = default_cache_dir() / "widened" / f"{expert_mib:g}-mib-{content}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        widen(bundled_model_path(), folder, expert_mib)
    return folder


def random_mixtral(model: RandomMixtral | None = None, *, progress: bool = True) -> Path:
    """The random checkpoint, in the layout that Mixtral's own have, with the bundled model's tokenizer."""
    model = model or RandomMixtral()
    return kept("random-mixtral", f"1 {model}", lambda folder: _write(model, folder, progress))


def kept(kind: str, description: str, write: Callable[[Path], object]) -> Path:
    """A checkpoint's folder, written once for each description. It appears whole or not at all."""
    name = xxhash.xxh3_64_hexdigest(description.encode())
    folder = default_cache_dir() / kind / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=folder.parent))
    try:
        write(draft)
        draft.chmod(0o755)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """The bundled model's."""
    for name in _TOKENIZER:
        shutil.copyfile(bundled_model_path() / name, folder / name)


def write_index(folder: Path, shards: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Which of these files has which tensors. Of the tensors only names and sizes count."""
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(tensor.nbytes for tensors in shards.values() for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def checkpoint_bytes(folder: Path) -> int:
    """Size of the weights on disk."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _write(model: RandomMixtral, folder: Path, progress: bool) -> None:
    shards = ["dense", *range(model.layers)]
    written: dict[str, dict[str, torch.Tensor]] = {}
    bar = tqdm(shards, desc="random checkpoint", unit="shard", disable=not progress)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # drawing is all that takes time, and one thread's work a tensor
        for number, shard in enumerate(bar, start=1):
            shapes = _dense_shapes(model) if shard == "dense" else _layer_shapes(model, int(shard))
            values = pool.map(drawn, shapes.keys(), shapes.values(), itertools.repeat(model.seed))
            tensors = dict(zip(shapes, values, strict=True))
            file = f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file(tensors, folder / file, metadata={"format": "pt"})
            written[file] = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_index(folder, written)
    write_json(folder / "config.json", model.config())
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    copy_tokenizer(folder)
    os.sync()  # a benchmark that follows is not to wait for it


def _dense_shapes(model: RandomMixtral) -> dict[str, tuple[int, ...]]:
    matrix = (model.vocabulary, model.hidden)
    return {"model.embed_tokens.weight": matrix, "model.norm.weight": (model.hidden,), "lm_head.weight": matrix}


def _layer_shapes(model: RandomMixtral, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = model.hidden, model.intermediate
    kv = hidden // model.heads * model.kv_heads
    at = f"model.layers.{layer}"
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
        f"{at}.self_attn.q_proj.weight": (hidden, hidden),
        f"{at}.self_attn.k_proj.weight": (kv, hidden),
        f"{at}.self_attn.v_proj.weight": (kv, hidden),
        f"{at}.self_attn.o_proj.weight": (hidden, hidden),
        f"{at}.block_sparse_moe.gate.weight": (model.experts, hidden),
    }
    for expert in range(model.experts):
        own = f"{at}.block_sparse_moe.experts.{expert}"
        shapes |= {f"{own}.w1.weight": (inner, hidden), f"{own}.w2.weight": (hidden, inner)}
        shapes[f"{own}.w3.weight"] = (inner, hidden)
    return shapes


def drawn(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor's values depend on its name and the seed alone. Norms are ones, all else is normal."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode(), seed=seed) >> 1)
    return torch.randn(shape, generator=generator).mul_(_SPREAD / shape[-1] ** 0.5).to(torch.bfloat16)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
