"""``config.json`` of a checkpoint, as it is written. Without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from greenroom.checkpoints.safetensors_headers import unreadable
from greenroom.core.errors import CorruptCheckpoint
from greenroom.gguf.shards import hint_of_files


def read_config(folder: Path, model: str) -> dict[str, Any]:
    """It has a ``model_type``. ``model``: the checkpoint's name, for errors. Raises CorruptCheckpoint."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        raw["model_type"] = str(raw["model_type"])
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{model} has no config.json{hint_of_files(folder)}") from None
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"config.json of {model} can not be read, or has no model_type: {error!r}") from error
    return raw
