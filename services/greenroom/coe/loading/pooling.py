"""How a checkpoint makes one embedding of a text: as its files of sentence-transformers say. Without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel

MODULES: Final = "modules.json"
_SERVED: Final = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """``first_token``: its row is the embedding; otherwise the mean of the rows that are no padding. ``normalised``: to
    length 1.
    """

    first_token: bool = False
    normalised: bool = False


def read_pooling(folder: Path, model: str) -> Pooling:
    """Without files of sentence-transformers the mean. ``model``: what errors call the checkpoint.

    Raises UnsupportedModel for steps other than pooling by the first token or the mean, and normalising.
    CorruptCheckpoint if a file is missing or broken.
    """
    if not (folder / MODULES).exists():
        return Pooling()
    first_token = normalised = False
    for module in _read(folder / MODULES, model, list):
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _SERVED:
            raise UnsupportedModel(f"{MODULES} of {model} has a step {kind!r}; served: {', '.join(_SERVED)}")
        normalised = normalised or kind == "Normalize"
        if kind == "Pooling":
            settings = _read(folder / Path(str(module.get("path", ""))).name / "config.json", model, dict)
            first_token = _is_first_token(settings, model)
    return Pooling(first_token, normalised)


def _is_first_token(settings: dict[str, Any], model: str) -> bool:
    modes = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on]
    if modes not in (["pooling_mode_cls_token"], ["pooling_mode_mean_tokens"]):
        raise UnsupportedModel(f"{model} pools by {' and '.join(modes) or 'nothing'}; served: cls_token, mean_tokens")
    return modes == ["pooling_mode_cls_token"]


def _read(path: Path, model: str, kind: type[Any]) -> Any:
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, kind):
            raise TypeError(f"a {type(found).__name__}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} of {model} can not be read: {error}") from error
    return found
