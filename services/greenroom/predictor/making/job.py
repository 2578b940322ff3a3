"""What is to be made, as the file that a process of its own is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.traces.samples import Sample

_FORMAT = "greenroom-making"
_KEPT, _EARLIER = "kept", "earlier"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """``samples``: of sequences of the model, oldest first, at least one. The last ``recorded`` of them are those that
    were foreseen badly. ``options``: see Kind.options. ``earlier``: the file of an earlier artifact; b"": none."""

    kind: str
    model: str
    shape: Shape
    samples: Sequence[Sample]
    options: Mapping[str, Any]
    earlier: bytes = b""
    recorded: int = 0


def dump_job(job: Job) -> bytes:
    metadata = {
        "format": _FORMAT,
        "kind": job.kind,
        "model": job.model,
        "shape": json.dumps([job.shape.layers, job.shape.experts]),
        "tasks": json.dumps([one.task for one in job.samples]),
        "lengths": json.dumps([len(one.array) for one in job.samples]),
        "options": json.dumps(dict(job.options)),
        "recorded": json.dumps(job.recorded),
    }
    kept = np.concatenate([one.array for one in job.samples])
    return dump_tensors({_KEPT: kept, _EARLIER: np.frombuffer(job.earlier, np.uint8)}, metadata)


def load_job(data: bytes) -> Job:
    """Raises Damaged."""
    arrays, metadata = load_tensors(data)
    try:
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r:.50}")
        ends = np.cumsum(json.loads(metadata["lengths"]))
        kept = np.split(arrays[_KEPT], ends[:-1])
        tasks = json.loads(metadata["tasks"])
        return Job(
            metadata["kind"],
            metadata["model"],
            Shape(*json.loads(metadata["shape"])),
            [Sample(task, array) for task, array in zip(tasks, kept, strict=True)],
            json.loads(metadata["options"]),
            arrays[_EARLIER].tobytes(),
            int(json.loads(metadata["recorded"])),
        )
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"it is no job: {error!r:.200}") from error
