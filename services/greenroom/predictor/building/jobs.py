"""A build as a file that goes to a process of its own, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.apart import ApartFailed, command_of, run_apart
from greenroom.predictor.building.kinds import KINDS, Kept
from greenroom.predictor.counts import Shape

BUILDER = command_of("greenroom.predictor.building.job")
_FORMAT = "greenroom-build"
_KEPT, _EARLIER = "kept", "earlier"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """``kept``: of each sequence, oldest first, at least one; the last ``recorded`` of them were recorded apart, as
    foreseen badly. ``earlier``: what was made of sequences that are not here any more. ``options``: see Kind."""

    kind: str
    model: str
    shape: Shape
    kept: Sequence[Kept]
    options: Mapping[str, Any]
    earlier: ArtifactFile | None = None
    recorded: int = 0


def dump_job(job: Job) -> bytes:
    metadata = {
        "format": _FORMAT,
        "kind": job.kind,
        "model": job.model,
        "shape": json.dumps([job.shape.layers, job.shape.experts]),
        "lengths": json.dumps([len(one) for one in job.kept]),
        "options": json.dumps(dict(job.options)),
        "recorded": json.dumps(job.recorded),
    }
    earlier = b"" if job.earlier is None else job.earlier.dump()
    return dump_tensors({_KEPT: np.concatenate(job.kept), _EARLIER: np.frombuffer(earlier, np.uint8)}, metadata)


def load_job(data: bytes) -> Job:
    """Raises Damaged."""
    arrays, metadata = load_tensors(data)
    try:
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r:.50}")
        kind = KINDS[metadata["kind"]]
        ends = np.cumsum(json.loads(metadata["lengths"]))
        earlier = arrays[_EARLIER].tobytes()
        return Job(
            metadata["kind"],
            metadata["model"],
            Shape(*json.loads(metadata["shape"])),
            np.split(arrays[_KEPT], ends[:-1]),
            json.loads(metadata["options"]),
            kind.file.parse(earlier) if earlier else None,
            int(json.loads(metadata["recorded"])),
        )
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"it is no build: {error!r:.200}") from error


async def build_apart(job: Job, *, timeout_s: float, command: Sequence[str] = BUILDER) -> ArtifactFile:
    """In a process of its own, which is killed after ``timeout_s`` or when this is cancelled. Raises ApartFailed,
    OSError."""
    data = await run_apart(command, lambda: dump_job(job), timeout_s=timeout_s, who="the builder")
    try:
        file = KINDS[job.kind].file.parse(data)
    except Damaged as error:
        raise ApartFailed(f"the builder left no artifact: {error}") from error
    if file.model != job.model or file.experts_per_layer != experts_of(job.shape):
        raise ApartFailed("the builder left another artifact than it was asked for")
    return file


def experts_of(shape: Shape) -> tuple[int, ...]:
    """By layer."""
    return (shape.experts,) * shape.layers
