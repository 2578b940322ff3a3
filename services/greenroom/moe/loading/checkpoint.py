"""Checkpoints in Hugging Face format: found in a folder or on the hub, and checked before they are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
from transformers import CONFIG_MAPPING, AutoConfig

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.moe.architecture.families import unsupported
from greenroom.moe.loading.quantization import refuse_quantized
from greenroom.moe.loading.safetensors_files import StoredTensor, merge_headers, read_header
from greenroom.text.hub import SMALL_FILES, download, local_folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with all its files, or only its configuration (``resolve_config``).

    ``name`` is what was asked for, ``config`` is transformers' own. ``tensors`` is empty if there is only the
    configuration.
    """

    name: str
    folder: Path
    config: Any
    tensors: Mapping[str, StoredTensor] = field(repr=False)

    @property
    def shards(self) -> list[Path]:
        return sorted({tensor.shard for tensor in self.tensors.values()})

    @property
    def stored_dtype(self) -> str:
        """The dtype that transformers' ``dtype="auto"`` chooses for the checkpoint."""
        if self.config.dtype is not None:
            return str(self.config.dtype).removeprefix("torch.")
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        return next((names[t.dtype] for t in self.tensors.values() if t.dtype in names), "float32")


def resolve(
    model: str, *, revision: str | None = None, offline: bool = False, cache_dir: Path | None = None
) -> Checkpoint:
    """The checkpoint in the folder ``model``, or else in the hub's repository with that id.

    Only the files that are needed are downloaded, and a model that is not served is refused before its weights.
    ``revision``: a branch, tag or commit. ``cache_dir``: None is the hub's default cache. ``offline``: use only the
    cache. Code in a checkpoint never runs. Raises InvalidConfig if there is no such model, CorruptCheckpoint if files
    are missing or truncated, UnsupportedModel if the model is not served.
    """
    own = local_folder(model, revision)
    if own is not None:
        return _checked(model, own, _read_config(own, model))
    offline = offline or huggingface_hub.is_offline_mode()
    folder = download(model, revision, offline, cache_dir, SMALL_FILES)
    config = _read_config(folder, model)
    weights = sorted(set(_weight_map(folder, model).values())) if (folder / INDEX).exists() else [WEIGHTS]
    folder = download(model, folder.name, offline, cache_dir, weights)  # of the same commit, even after a push
    try:
        return _checked(model, folder, config)
    except CorruptCheckpoint as error:
        hint = "; the cache does not have all of it, so run once without offline mode" if offline else ""
        raise CorruptCheckpoint(f"{error}{hint}") from error


def resolve_config(
    model: str, *, revision: str | None = None, offline: bool = False, cache_dir: Path | None = None
) -> Checkpoint:
    """As ``resolve``, but no weights are downloaded, and they may be missing; the checkpoint then has no tensors.

    Weights that are there are checked.
    """
    own = local_folder(model, revision)
    if own is not None:
        config = _read_config(own, model)
        alone = not any(path.suffix in (".safetensors", ".bin") for path in _listed(own))
        return Checkpoint(model, own, config, {}) if alone else _checked(model, own, config)
    folder = download(model, revision, offline or huggingface_hub.is_offline_mode(), cache_dir, SMALL_FILES)
    config = _read_config(folder, model)
    weights = set(_weight_map(folder, model).values()) if (folder / INDEX).exists() else {WEIGHTS}
    cached = all((folder / name).exists() for name in weights)
    return _checked(model, folder, config) if cached else Checkpoint(model, folder, config, {})


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(path: Path, error: OSError) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{path} can not be read: {error.strerror or error}")


def _read_config(folder: Path, model: str) -> Any:
    """transformers' configuration. Raises if the model is not served, before any weight is read."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        model_type = raw["model_type"]
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{model} has no config.json") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpoint(f"config.json of {model} can not be read, or has no model_type: {error!r}") from error
    refuse_quantized(raw, model)
    if raw.get("transformers_weights"):
        raise unsupported(model_type, "it keeps its weights under a name of its own (transformers_weights)")
    if model_type not in CONFIG_MAPPING:
        own_code = " and needs code of its own (auto_map), which is never run" if "auto_map" in raw else ""
        raise unsupported(model_type, f"the installed transformers does not know it{own_code}")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the JSON is untrusted, so transformers may raise anything
        raise CorruptCheckpoint(f"config.json of {model} is not valid: {error}") from error


def _weight_map(folder: Path, model: str) -> dict[str, str]:
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        pairs = {str(key): str(shard) for key, shard in weight_map.items()}
    except OSError as error:
        raise _unreadable(folder / INDEX, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{INDEX} of {model} can not be read: {error!r}") from error
    for shard in pairs.values():
        if Path(shard).name != shard:
            raise CorruptCheckpoint(f"{INDEX} of {model} names {shard!r}, which is no file beside it")
    return pairs


def _checked(model: str, folder: Path, config: Any) -> Checkpoint:
    _listed(folder)  # otherwise files in a folder without read permission would be reported as missing
    if (folder / WEIGHTS).exists():
        return Checkpoint(model, folder, config, read_header(folder / WEIGHTS))
    if not (folder / INDEX).exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.bin.index.json")):
            raise UnsupportedModel(
                f"{model} has its weights as pickle (.bin) only, which can run code when it is loaded: convert it once "
                "with transformers' save_pretrained on a machine where that may happen"
            )
        raise CorruptCheckpoint(f"{model} has neither {WEIGHTS} nor {INDEX}; only safetensors are loaded")
    weight_map = _weight_map(folder, model)
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise CorruptCheckpoint(f"{model} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing[:5])}")
    tensors = merge_headers({shard: read_header(shard) for shard in shards})
    lost = [key for key, shard in weight_map.items() if key not in tensors or tensors[key].shard.name != shard]
    if lost:
        raise CorruptCheckpoint(f"{model}: {lost[0]} and {len(lost) - 1} more are not where {INDEX} says")
    return Checkpoint(model, folder, config, {key: tensors[key] for key in weight_map})
