"""Which files of a checkpoint's folder hold its weights, and whether all of them are there. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

from greenroom.checkpoints.safetensors_headers import StoredTensor, merge_headers, read_header, unreadable
from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.gguf.shards import hint_of_files

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def listed(folder: Path) -> list[Path]:
    """Raises CorruptCheckpoint for a folder that may not be read, whose files would be reported as missing."""
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def weight_names(folder: Path, model: str) -> list[str]:
    """The files that hold the weights, by the index if there is one. They may be missing. Raises CorruptCheckpoint."""
    return sorted(set(_weight_map(folder, model).values())) if (folder / INDEX).exists() else [WEIGHTS]


def stored_tensors(folder: Path, model: str) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint. ``model``: its name, for errors.

    Raises CorruptCheckpoint if files are missing, truncated or contradict each other, UnsupportedModel if there are
    only pickled ones.
    """
    listed(folder)
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        if any(folder.glob("*.bin")) or any(folder.glob("*.bin.index.json")):
            raise UnsupportedModel(
                f"{model} has its weights as pickle (.bin) only, which can run code when it is loaded: convert it once "
                "with transformers' save_pretrained on a machine where that may happen"
            )
        raise CorruptCheckpoint(
            f"{model} has neither {WEIGHTS} nor {INDEX}; only safetensors are loaded{hint_of_files(folder)}"
        )
    weight_map = _weight_map(folder, model)
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing:
        raise CorruptCheckpoint(
            f"{model} lacks {len(missing)} of {len(shards)} shards that {INDEX} names, so it was not fully downloaded: "
            f"{', '.join(missing[:5])}"
        )
    tensors = merge_headers({shard: read_header(shard) for shard in shards})
    lost = [key for key, shard in weight_map.items() if key not in tensors or tensors[key].shard.name != shard]
    if lost:
        raise CorruptCheckpoint(f"{model}: {lost[0]} and {len(lost) - 1} more are not where {INDEX} says")
    return {key: tensors[key] for key in weight_map}


def _weight_map(folder: Path, model: str) -> dict[str, str]:
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        pairs = {str(key): str(shard) for key, shard in weight_map.items()}
    except OSError as error:
        raise unreadable(folder / INDEX, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"{INDEX} of {model} can not be read: {error!r}") from error
    for shard in pairs.values():
        if Path(shard).name != shard:
            raise CorruptCheckpoint(f"{INDEX} of {model} names {shard!r}, which is no file beside it")
    return pairs
