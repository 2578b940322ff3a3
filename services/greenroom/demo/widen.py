"""Pads a small checkpoint's experts with zeros until they have the size of a real model's.

A gated expert computes `down(silu(gate x) * up x)`. Rows of zeros in gate and up make inner values of 0, which columns
of zeros in down ignore, so the function and the routing stay as they were, up to rounding, while every expert weighs
what a benchmark of transfers needs. The padding is streamed tensor by tensor; the whole is never in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from tqdm import tqdm

from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from greenroom.core.files import check_new_folder, whole_folder
from greenroom.core.model_profile import dump_model_profile, load_model_profile
from greenroom.core.units import MIB, format_bytes

_FAMILIES: Final = ("qwen3_moe",)
_WIDTH_MULTIPLE: Final = 64
_SHARD_BYTES: Final = 512 * MIB
_ITEM_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}
_EXPERT: Final = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_COPIED: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_PROFILE: Final = "profile.json"


@dataclass(frozen=True)
class Widened:
    """What `widen` wrote.

    Attributes:
        path: the new checkpoint's folder.
        width: the experts' new intermediate width.
        expert_bytes: size of one expert.
        total_bytes: size of all tensors.
        experts: number of experts over all layers.
    """

    path: Path
    width: int
    expert_bytes: int
    total_bytes: int
    experts: int


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the source and the shape that it gets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    target: tuple[int, ...]
    file: Path
    offset: int

    @property
    def item(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def target_bytes(self) -> int:
        return int(np.prod(self.target, dtype=np.int64)) * self.item


def widen(model_dir: Path, out_dir: Path, expert_mib: float, *, progress: bool = True) -> Widened:
    """Writes a copy of `model_dir` to `out_dir` whose experts have at least `expert_mib` MiB each.

    Of a profile beside it everything is kept but the costs: who is routed where stays, what it takes does not.
    The width is rounded up to a multiple of 64. `out_dir` appears whole or not at all; it may exist if it is empty.

    Raises:
        InvalidConfig: if `out_dir` is not empty, the experts are larger already, the disk has too little room, or the
            profile beside the model can not be read.
        UnsupportedModel: if the model is of a family whose experts this does not know how to pad.
        CorruptCheckpoint: if the files contradict their configuration.
    """
    config = _read_config(model_dir)
    hidden, old = int(config["hidden_size"]), int(config["moe_intermediate_size"])
    tensors = list(_tensors(model_dir))
    sizes = {t.item for t in tensors if _EXPERT.search(t.name)}
    if len(sizes) != 1:
        raise CorruptCheckpoint(f"{model_dir}: no experts stored one by one in one dtype")
    row_bytes = 3 * hidden * sizes.pop()
    least = -(-int(expert_mib * MIB) // row_bytes)
    width = -(-least // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
    if width < old:
        allowed = f"the experts have {format_bytes(row_bytes * old)} already; give more than that"
        raise InvalidConfig("--expert-mib", expert_mib, allowed)
    check_new_folder(out_dir)

    tensors = [_resized(tensor, hidden, old, width) for tensor in tensors]
    total = sum(tensor.target_bytes for tensor in tensors)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out_dir.parent).free
    if free < total:
        allowed = f"it needs {format_bytes(total)}, the disk has {format_bytes(free)} free"
        raise InvalidConfig("DIR", str(out_dir), allowed)

    with whole_folder(out_dir) as draft:
        with tqdm(total=total, unit="B", unit_scale=True, desc="widening", disable=not progress) as bar:
            _write_shards(tensors, draft, total, bar)
        config["moe_intermediate_size"] = width
        _write_json(draft / "config.json", config)
        for name in _COPIED:
            if (model_dir / name).exists():
                shutil.copyfile(model_dir / name, draft / name)
        if (model_dir / _PROFILE).is_file():
            profile = msgspec.structs.replace(load_model_profile(model_dir / _PROFILE), costs=None)
            (draft / _PROFILE).write_bytes(dump_model_profile(profile))
    experts = sum(1 for tensor in tensors if tensor.name.endswith(".down_proj.weight"))
    return Widened(out_dir, width, row_bytes * width, total, experts)


def _read_config(model_dir: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{model_dir}: config.json can not be read: {error}") from error
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise UnsupportedModel(f"can not widen the family {family!r}; it works for: {', '.join(_FAMILIES)}")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModel("can not widen a model with dense layers between its MoE layers")
    return config


def _tensors(model_dir: Path) -> Iterator[_Tensor]:
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise CorruptCheckpoint(f"{model_dir}: there are no safetensors files")
    for file in files:
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            size = file.stat().st_size
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                begin, end = entry["data_offsets"]
                dtype, shape = entry["dtype"], tuple(entry["shape"])
                if dtype not in _ITEM_BYTES:
                    raise UnsupportedModel(f"can not widen {name} of dtype {dtype}")
                tensor = _Tensor(name, dtype, shape, shape, file, 8 + length + begin)
                if end - begin != tensor.target_bytes or 8 + length + end > size:
                    raise CorruptCheckpoint(f"{file}: {name} is truncated")
                yield tensor
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"{file}: not a readable safetensors file: {error}") from error


def _resized(tensor: _Tensor, hidden: int, old: int, width: int) -> _Tensor:
    match = _EXPERT.search(tensor.name)
    if match is None:
        return tensor
    expected, target = ((hidden, old), (hidden, width)) if match[1] == "down" else ((old, hidden), (width, hidden))
    if tensor.shape != expected:
        raise CorruptCheckpoint(f"{tensor.file}: {tensor.name} has shape {tensor.shape}, not {expected}")
    return _Tensor(tensor.name, tensor.dtype, tensor.shape, target, tensor.file, tensor.offset)


def _write_shards(tensors: list[_Tensor], folder: Path, total: int, bar: tqdm[Any]) -> None:
    shards: list[list[_Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.target_bytes > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.target_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {tensor.name: name for tensor in shard}
        with (folder / name).open("wb") as stream:
            _write_header(stream, shard)
            for tensor in shard:
                stream.write(_padded(tensor))
                bar.update(tensor.target_bytes)
            stream.flush()
            os.fsync(stream.fileno())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_header(stream: BinaryIO, tensors: list[_Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.target_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.target, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little") + text)


def _padded(tensor: _Tensor) -> memoryview:
    words = np.dtype(f"<u{tensor.item}")  # only moved, never computed with
    count = int(np.prod(tensor.shape, dtype=np.int64))
    source = np.fromfile(tensor.file, words, count, offset=tensor.offset).reshape(tensor.shape)
    if tensor.shape == tensor.target:
        return source.data
    padded = np.zeros(tensor.target, words)
    padded[tuple(slice(0, size) for size in tensor.shape)] = source
    return padded.data


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
