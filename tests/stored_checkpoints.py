"""A checkpoint in each format that experts can stay in, made of one of numbers; and the same with more experts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from greenroom.moe.formats.expert_format import ExpertFormat
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.kept_format import kept_format
from tests import int4_checkpoints
from tests.fp8_checkpoints import all_tensors, to_fp8
from tests.gguf_checkpoints import ARCHITECTURES, save_gguf
from tests.int4_checkpoints import save_int4
from tests.mxfp4_checkpoints import save_mxfp4
from tests.random_checkpoints import edit_json

Write = Callable[[Path, Path, "Size | None"], Path]
"""Of ``(plain, folder, size)`` what to load: the checkpoint ``plain`` in a format, in ``folder``."""


@dataclass(frozen=True)
class Size:
    """Of a checkpoint that is made larger by copies of its layers and experts. Routers are drawn anew, so that picks
    differ."""

    layers: int
    experts: int


@dataclass(frozen=True)
class StoredKind:
    """``formats``: of the records. ``experts_as``: what keeps them so."""

    write: Write
    formats: frozenset[str]
    experts_as: str = "stored"

    def kept(self, checkpoint: Checkpoint) -> ExpertFormat:
        """The format of the records, whatever the processor."""
        if self.experts_as == "lossless":
            return next(one for one in (LOSSLESS, LOSSLESS_PLANES) if one.name in self.formats)
        return kept_format(checkpoint, experts_as="stored")


def _fp8(kind: str) -> Write:
    return lambda plain, folder, size: enlarged(to_fp8(plain, folder / "model", kind), size)


def _int4(kind: str) -> Write:
    own = int4_checkpoints.KINDS[kind]
    return lambda plain, folder, size: enlarged(save_int4(plain, folder / "model", own), size)


def _gguf(kind: Callable[[str], Kind]) -> Write:
    def write(plain: Path, folder: Path, size: Size | None) -> Path:
        family = json.loads((plain / "config.json").read_text())["model_type"]
        at = MODEL_ARCH_NAMES[ARCHITECTURES[family]]
        said: dict[str, Any] = {"tokenizer.ggml.model": "no_vocab"}
        if size is not None:
            said |= {f"{at}.block_count": size.layers, f"{at}.expert_count": size.experts}
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (plain / name).exists():
                shutil.copy(plain / name, folder / name)
        return save_gguf(
            plain, folder / "model.gguf", kind, metadata=said,
            tensors=None if size is None else lambda stored: _enlarge_blocks(stored, size),
        )  # fmt: skip

    return write


def _mxfp4(plain: Path, folder: Path, size: Size | None) -> Path:
    """gpt-oss alone has it, so it is of no other checkpoint."""
    assert size is None
    return save_mxfp4(
        folder / "model", hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_local_experts=4,
        head_dim=64, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip


def _plain(plain: Path, folder: Path, size: Size | None) -> Path:
    return enlarged(Path(shutil.copytree(plain, folder / "model")), size)


def q4_k_m(name: str) -> Kind:
    """As llama.cpp calls it: the down projections of half the layers have more bits."""
    own = Kind.Q6_K if "ffn_down" in name and int(name.split(".")[1]) % 2 == 0 else Kind.Q4_K
    return Kind.F32 if "ffn_gate_inp" in name else own


KINDS: Final[Mapping[str, StoredKind]] = {
    "fp8-blocks": StoredKind(_fp8("blocks"), frozenset({"fp8-blocks"})),
    "fp8-channels": StoredKind(_fp8("compressed-channels"), frozenset({"fp8-rows"})),
    "gptq": StoredKind(_int4("gptq"), frozenset({"int4"})),
    "gptq-act-order": StoredKind(_int4("gptq-act-order"), frozenset({"int4"})),
    "awq": StoredKind(_int4("awq"), frozenset({"int4"})),
    "packed": StoredKind(_int4("packed"), frozenset({"int4"})),
    "q8_0": StoredKind(_gguf(lambda name: Kind.F32 if "ffn_gate_inp" in name else Kind.Q8_0), frozenset({"int8"})),
    "q4_k_m": StoredKind(_gguf(q4_k_m), frozenset({"q4_k", "q4_k-q6_k"})),
    "q6_k": StoredKind(_gguf(lambda name: Kind.F32 if "ffn_gate_inp" in name else Kind.Q6_K), frozenset({"q6_k"})),
    "mxfp4-gguf": StoredKind(_gguf(lambda name: Kind.MXFP4 if "_exps." in name else Kind.F16), frozenset({"fp4"})),
    "mxfp4": StoredKind(_mxfp4, frozenset({"mxfp4"})),
    "lossless": StoredKind(_plain, frozenset({"lossless"}), "lossless"),
    "lossless-planes": StoredKind(_plain, frozenset({"lossless-planes"}), "lossless"),
}


def enlarged(folder: Path, size: Size | None) -> Path:
    """The checkpoint of safetensors with so many layers and experts, in one file."""
    if size is None:
        return folder
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    stored = all_tensors(folder)
    layers, own = (
        1 + max(int(found[1]) for name in stored if (found := number.search(name))) for number in (_LAYER, _EXPERT)
    )
    for name, tensor in stored.items():
        found = _LAYER.search(name)
        for layer in (0,) if found is None else range(int(found[1]), size.layers, layers):
            of_layer = _LAYER.sub(f".layers.{layer}.", name)
            if name.endswith(_ROUTER):
                drawn = torch.randn(size.experts, tensor.shape[1], generator=generator)
                tensors[of_layer] = (drawn * 1.5 / tensor.shape[1] ** 0.5).to(tensor.dtype)
            elif (place := _EXPERT.search(of_layer)) is None:
                tensors[of_layer] = tensor.clone()
            else:
                for expert in range(int(place[1]), size.experts, own):
                    tensors[_EXPERT.sub(f".experts.{expert}.", of_layer)] = tensor.clone()
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(
        folder / "config.json",
        lambda config: config.update(num_hidden_layers=size.layers, num_local_experts=size.experts),
    )
    return folder


_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_EXPERT: Final = re.compile(r"\.experts\.(\d+)\.")
_ROUTER: Final = ".gate.weight"


def _enlarge_blocks(stored: dict[str, tuple[np.ndarray[Any, Any], Kind]], size: Size) -> None:
    """As ``enlarged``, of what a GGUF file is written of. It has a layer of each mixture of types."""
    random = np.random.default_rng(0)
    layers = 1 + max(int(name.split(".")[1]) for name in stored if name.startswith("blk."))
    for name, (data, kind) in list(stored.items()):
        if not name.startswith("blk."):
            continue
        _, first, rest = name.split(".", 2)
        for layer in range(int(first), size.layers, layers):
            made = data
            if "ffn_gate_inp" in rest:
                made = (random.standard_normal((size.experts, data.shape[1])) * 1.5 / data.shape[1] ** 0.5).astype(
                    np.float32
                )
            elif "_exps." in rest:
                made = np.concatenate([data] * (size.experts // len(data)))
            stored[f"blk.{layer}.{rest}"] = made, kind
