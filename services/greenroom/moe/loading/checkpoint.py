"""Checkpoints: found in a folder, in a GGUF file or on the hub, and checked before they are loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
from transformers import CONFIG_MAPPING, AutoConfig

from greenroom.checkpoints.config_file import read_config
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.checkpoints.weight_files import listed, stored_tensors, weight_names
from greenroom.core.errors import CorruptCheckpoint
from greenroom.moe.architecture.families import unsupported
from greenroom.moe.loading.gguf_checkpoint import GgufLayout, read_gguf_checkpoint
from greenroom.moe.loading.quantization import refuse_quantized
from greenroom.text.hub import SMALL_FILES, download, local_model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with all its files, or only its configuration (``resolve_config``).

    ``name`` is what was asked for, ``config`` is transformers' own. ``tensors`` is empty if there is only the
    configuration. ``folder`` is the file where it is GGUF; ``gguf`` is then what that has otherwise.
    """

    name: str
    folder: Path
    config: Any
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    gguf: GgufLayout | None = field(default=None, repr=False)

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
    """The checkpoint in the folder or the GGUF file ``model``, or else in the hub's repository with that id.

    Only the files that are needed are downloaded, and a model that is not served is refused before its weights.
    ``revision``: a branch, tag or commit. ``cache_dir``: None is the hub's default cache. ``offline``: use only the
    cache. Code in a checkpoint never runs. Raises InvalidConfig if there is no such model, CorruptCheckpoint if files
    are missing or truncated, UnsupportedModel if the model is not served.
    """
    own = local_model(model, revision)
    if own is not None:
        return _of_gguf(model, own) if own.is_file() else _checked(model, own, _read_config(own, model))
    offline = offline or huggingface_hub.is_offline_mode()
    folder = download(model, revision, offline, cache_dir, SMALL_FILES)
    with _told_of_repository(model):
        config = _read_config(folder, model)
        # of the same commit, even after a push
        folder = download(model, folder.name, offline, cache_dir, weight_names(folder, model))
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
    own = local_model(model, revision)
    if own is not None:
        if own.is_file():
            return _of_gguf(model, own)
        config = _read_config(own, model)
        alone = not any(path.suffix in (".safetensors", ".bin") for path in listed(own))
        return Checkpoint(model, own, config, {}) if alone else _checked(model, own, config)
    folder = download(model, revision, offline or huggingface_hub.is_offline_mode(), cache_dir, SMALL_FILES)
    with _told_of_repository(model):
        config = _read_config(folder, model)
        cached = all((folder / name).exists() for name in weight_names(folder, model))
        return _checked(model, folder, config) if cached else Checkpoint(model, folder, config, {})


@contextlib.contextmanager
def _told_of_repository(model: str) -> Iterator[None]:
    """Errors say what to do about a repository of GGUF files, of which nothing but the name tells."""
    try:
        yield
    except CorruptCheckpoint as error:
        if "gguf" not in model.lower():
            raise
        raise CorruptCheckpoint(
            f"{error}; a repository is not searched for GGUF files: get one with `hf download {model} FILE.gguf` and "
            "name it"
        ) from error


def _read_config(folder: Path, model: str) -> Any:
    """transformers' configuration. Raises if the model is not served, before any weight is read."""
    raw = read_config(folder, model)
    model_type = raw["model_type"]
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


def _of_gguf(model: str, path: Path) -> Checkpoint:
    parts = read_gguf_checkpoint(path)
    return Checkpoint(model, path, parts.config, parts.tensors, parts.layout)


def _checked(model: str, folder: Path, config: Any) -> Checkpoint:
    return Checkpoint(model, folder, config, stored_tensors(folder, model))
