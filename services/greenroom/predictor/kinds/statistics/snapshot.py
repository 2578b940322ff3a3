"""One version of a model's statistics, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.forecast_kinds import STATISTICS
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counted_ids import DIGEST_BYTES
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.versions.artifact import Codec

FORMAT = "greenroom-predictor"
FORMAT_VERSION = "1"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Statistics that do not change any more. ``everything``: over all task types. ``seen``: uint8[n, 16], digests of
    the ids of the last sequences in it. A sequence that is read again after a restart is found there, and not counted
    again."""

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
    def sequences(self) -> int:
        return self.everything.sequences


def dump_snapshot(snapshot: Snapshot) -> bytes:
    """A safetensors file with ``all.popularity`` and ``all.affinity``, and ``task.N.popularity`` and
    ``task.N.affinity`` for the N-th of ``tasks``, JSON in the metadata."""
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
        "kind": STATISTICS,
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


SNAPSHOTS = Codec(STATISTICS, dump_snapshot, load_snapshot)


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
