"""An expert activation matrix collection as a file: safetensors, read without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import InvalidConfig
from greenroom.core.files import write_whole
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors

FORMAT = "greenroom-eamc"
FORMAT_VERSION = "1"
_MATRICES = "matrices"


@dataclass(frozen=True, slots=True, eq=False)
class EamcFile:
    """``matrices[P, N]``: tokens by expert of each member, over all experts of all layers, the first layer's first.

    ``sequences``: that it was chosen from. ``report``: of how it was made, JSON. ``model``: as services call it, or "".
    """

    model: str
    experts_per_layer: tuple[int, ...]
    matrices: npt.NDArray[np.float32]
    sequences: int
    version: int = 1
    created_ms: int = field(default_factory=lambda: round(time.time() * 1000))
    report: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidConfig where they are no counts of such a model."""
        experts = sum(self.experts_per_layer)
        if not self.experts_per_layer or min(self.experts_per_layer) < 1:
            raise InvalidConfig("experts_per_layer", self.experts_per_layer, "at least one layer, each with an expert")
        if self.matrices.ndim != 2 or self.matrices.shape[1] != experts or not len(self.matrices):
            raise InvalidConfig(_MATRICES, self.matrices.shape, f"[members, {experts}]")
        if self.matrices.dtype != np.float32 or not np.isfinite(self.matrices).all() or (self.matrices < 0).any():
            raise InvalidConfig(_MATRICES, str(self.matrices.dtype), "float32 that counts tokens")

    @property
    def shape(self) -> str:
        """For people."""
        layers, widths = len(self.experts_per_layer), sorted(set(self.experts_per_layer))
        return f"{layers} layers × {' or '.join(map(str, widths))} experts"


def dump_eamc(eamc: EamcFile) -> bytes:
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "model": eamc.model,
        "version": str(eamc.version),
        "created_ms": str(eamc.created_ms),
        "experts_per_layer": json.dumps(eamc.experts_per_layer),
        "sequences": str(eamc.sequences),
        "report": json.dumps(eamc.report),
    }
    return dump_tensors({_MATRICES: eamc.matrices}, metadata)


def parse_eamc(data: bytes) -> EamcFile:
    """Raises Damaged. The array is a read-only view of ``data``."""
    arrays, metadata = load_tensors(data)
    if (metadata.get("format"), metadata.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise Damaged(f"it is no {FORMAT} file of version {FORMAT_VERSION}")
    try:
        experts = tuple(int(count) for count in json.loads(metadata["experts_per_layer"]))
        return EamcFile(
            model=metadata["model"],
            experts_per_layer=experts,
            matrices=arrays[_MATRICES],
            sequences=int(metadata["sequences"]),
            version=int(metadata["version"]),
            created_ms=int(metadata["created_ms"]),
            report=json.loads(metadata["report"]),
        )
    except (LookupError, ValueError, TypeError, OverflowError, RecursionError, InvalidConfig) as error:
        raise Damaged(f"something is missing or wrong in it: {error!r:.200}") from error


def read_eamc(path: Path) -> EamcFile:
    """Raises InvalidConfig, naming the file, where it is none."""
    try:
        return parse_eamc(path.read_bytes())
    except OSError as error:
        raise InvalidConfig("eamc", str(path), f"a file that can be read: {error.strerror}") from error
    except Damaged as error:
        raise InvalidConfig("eamc", str(path), f"a file that `greenroom eamc build` made: {error}") from error


def write_eamc(path: Path, eamc: EamcFile) -> None:
    """Whole or not there. Raises OSError."""
    write_whole(path, dump_eamc(eamc))
