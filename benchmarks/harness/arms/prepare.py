"""Makes what the arms need before anything is measured: checkpoints, packs, folders of offloaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.arms.transformers_arms import write_offload_folder
from benchmarks.harness.inputs.checkpoints import (
    LARGE_RANDOM,
    LONG_RANDOM,
    checkpoint_bytes,
    random_mixtral,
    random_of_size,
    widened,
)
from greenroom.demo import bundled_model_path
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.kept_pack import kept_pack


class Prepare:
    """``model``: ``bundled``, ``large``, ``long``, or ``widened`` or ``random``, of ``expert_mib`` an expert."""

    def __init__(self, model: str, expert_mib: float, offload_folder: str | None = None) -> None:
        if model == "bundled":
            folder = bundled_model_path()
        elif model == "widened":
            folder = widened(expert_mib)
        elif model == "large":
            folder = random_mixtral(LARGE_RANDOM)
        elif model == "long":
            folder = random_mixtral(LONG_RANDOM)
        else:
            folder = random_mixtral(random_of_size(expert_mib))
        checkpoint = resolve(str(folder))
        self._ready: dict[str, Any] = {
            "folder": str(folder),
            "pack": str(kept_pack(checkpoint).path),
            "checkpoint_bytes": checkpoint_bytes(folder),
            "vocabulary": checkpoint.config.vocab_size,
        }
        if offload_folder is not None:
            write_offload_folder(folder, Path(offload_folder))

    def describe(self) -> dict[str, Any]:
        return self._ready

    def close(self) -> None:
        pass
