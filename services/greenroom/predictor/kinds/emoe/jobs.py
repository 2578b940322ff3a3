"""A training as a file that goes to a process of its own, and what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact, dump_learned, load_learned
from greenroom.predictor.kinds.emoe.config import TrainingConfig
from greenroom.predictor.kinds.emoe.samples import Sample, Sequences, stack
from greenroom.predictor.making.subprocess_job import ApartFailed, command_of, run_apart

TRAINER = command_of("greenroom.predictor.kinds.emoe.job")
_FORMAT = "greenroom-training"
_SERVED = "served"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """``served``: what is served now, which is measured on the same prompts."""

    model: str
    sequences: Sequences
    config: TrainingConfig
    served: LearnedArtifact | None = None


def dump_job(job: Job) -> bytes:
    metadata = {
        "format": _FORMAT,
        "model": job.model,
        "tasks": json.dumps(job.sequences.tasks),
        "config": json.dumps(asdict(job.config)),
    }
    served = b"" if job.served is None else dump_learned(job.served)
    return dump_tensors({"counts": job.sequences.counts, _SERVED: np.frombuffer(served, np.uint8)}, metadata)


def load_job(data: bytes) -> Job:
    """Raises Damaged."""
    arrays, metadata = load_tensors(data)
    try:
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r:.50}")
        sequences = Sequences(tuple(json.loads(metadata["tasks"])), arrays["counts"])
        served = load_learned(arrays[_SERVED].tobytes()) if arrays[_SERVED].size else None
        return Job(metadata["model"], sequences, TrainingConfig(**json.loads(metadata["config"])), served)
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, InvalidConfig) as error:
        raise Damaged(f"it is no training: {error!r:.200}") from error


async def train_apart(
    model: str,
    samples: Sequence[Sample],
    config: TrainingConfig,
    *,
    timeout_s: float,
    command: Sequence[str] = TRAINER,
    served: LearnedArtifact | None = None,
) -> LearnedArtifact:
    """In a process of its own, which is killed after ``timeout_s`` or when this is cancelled. ``served``: what is
    served now, which it is to be compared with. Raises ApartFailed, OSError."""

    def job() -> bytes:
        return dump_job(Job(model, stack(samples), config, served))

    data = await run_apart(command, job, timeout_s=timeout_s, who="the trainer")
    try:
        artifact = await asyncio.to_thread(load_learned, data)
    except Damaged as error:
        raise ApartFailed(f"the trainer left no artifact: {error}") from error
    if artifact.model != model or artifact.architecture.kind != config.kind:
        raise ApartFailed("the trainer left another artifact than it was asked for")
    return artifact
