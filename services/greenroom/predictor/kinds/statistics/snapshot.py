"""One version of what is known of a model, as it is kept, served and handed to workers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counted_ids import DIGEST_BYTES
from greenroom.predictor.traces.counts import Shape

FORMAT = "greenroom-predictor"
FORMAT_VERSION = "1"
KIND = "statistics"


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """What a list of artifacts says of each. ``created_ms``: Unix time. ``bytes``: of the file. ``withheld``: why it is
    not served unless someone pins it; "": it may be."""

    version: int
    model: str
    created_ms: int
    sequences: int
    bytes: int = 0
    kind: str = KIND
    withheld: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Statistics that change no more. ``everything``: over all task types. ``seen``: uint8[n, 16], the digests of the
    last sequences in it, so that one which is read again after a restart is not counted again."""

    model: str
    version: int
    created_ms: int
    everything: Statistics
    tasks: Mapping[str, Statistics]
    seen: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty((0, DIGEST_BYTES), np.uint8))

    @property
    def shape(self) -> Shape:
        return self.everything.shape

    @property
    def info(self) -> ArtifactInfo:
        return ArtifactInfo(self.version, self.model, self.created_ms, self.everything.sequences)


def dump_snapshot(snapshot: Snapshot) -> bytes:
    """A safetensors file. ``all.popularity``, ``all.affinity``, and ``task.N.popularity``, ``task.N.affinity`` for the
    N-th of ``tasks`` in the metadata, which is JSON there."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "all.popularity": snapshot.everything.popularity,
        "all.affinity": snapshot.everything.affinity,
    }
    for number, statistics in enumerate(snapshot.tasks.values()):
        arrays[f"task.{number}.popularity"] = statistics.popularity
        arrays[f"task.{number}.affinity"] = statistics.affinity
    arrays["seen"] = snapshot.seen
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": KIND,
        "model": snapshot.model,
        "version": str(snapshot.version),
        "created_ms": str(snapshot.created_ms),
        "layers": str(snapshot.shape.layers),
        "experts": str(snapshot.shape.experts),
        "all": json.dumps(_weights(snapshot.everything)),
        "tasks": json.dumps([{"name": name, **_weights(one)} for name, one in snapshot.tasks.items()]),
    }
    return dump_tensors(arrays, metadata)


def load_snapshot(data: bytes) -> Snapshot:
    """Raises Damaged. The arrays are read-only views of ``data``."""
    arrays, metadata = load_tensors(data)
    if (metadata.get("format"), metadata.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise Damaged(f"it is no {FORMAT} file of version {FORMAT_VERSION}")
    try:
        shape = Shape(int(metadata["layers"]), int(metadata["experts"]))
        tasks = json.loads(metadata["tasks"])
        return Snapshot(
            model=metadata["model"],
            version=int(metadata["version"]),
            created_ms=int(metadata["created_ms"]),
            everything=_statistics(shape, arrays, "all", json.loads(metadata["all"])),
            tasks={
                task["name"]: _statistics(shape, arrays, f"task.{number}", task) for number, task in enumerate(tasks)
            },
            seen=arrays["seen"].reshape(-1, DIGEST_BYTES),
        )
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"something is missing or wrong in it: {error!r:.200}") from error


def _weights(statistics: Statistics) -> dict[str, Any]:
    return {"weight": statistics.weight, "sequences": statistics.sequences}


def _statistics(
    shape: Shape, arrays: Mapping[str, npt.NDArray[Any]], name: str, entry: Mapping[str, Any]
) -> Statistics:
    popularity, affinity = arrays[f"{name}.popularity"], arrays[f"{name}.affinity"]
    layers, experts = shape.layers, shape.experts
    if popularity.shape != (layers, experts) or affinity.shape != (layers - 1, experts, experts):
        raise ValueError(f"{name} is of {popularity.shape} and {affinity.shape}, the model has {shape}")
    return Statistics(shape, popularity, affinity, float(entry["weight"]), int(entry["sequences"]))
