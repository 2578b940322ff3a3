"""A training as a file that goes to a process of its own, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.core.units import KIB
from greenroom.predictor.learned.artifact import LearnedArtifact, dump_learned, load_learned
from greenroom.predictor.learned.config import TrainingConfig
from greenroom.predictor.learned.samples import Sample, Sequences, stack
from greenroom.predictor.learned.workspace import workspace

TRAINER = (sys.executable, "-m", "greenroom.predictor.learned.job")
"""Started with the file of its job, the one to write its artifact to, and the process without which it ends."""
_FORMAT = "greenroom-training"
_SERVED = "served"
_MAX_LINE = 500
_MAX_LOG_BYTES = 64 * KIB
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class TrainingFailed(GreenroomError):
    """The trainer ended without an artifact. ``why``: a word for metrics."""

    def __init__(self, message: str, why: str = "failed") -> None:
        super().__init__(message)
        self.why = why


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
    served now, which it is to be compared with. Raises TrainingFailed, OSError."""
    with workspace() as folder:
        source, target = folder / "job.safetensors", folder / "artifact.safetensors"
        await asyncio.to_thread(_write_job, source, model, samples, config, served)
        await _run([*command, str(source), str(target), str(os.getpid())], folder / "log", timeout_s)
        try:
            artifact = await asyncio.to_thread(_read_artifact, target)
        except (OSError, Damaged) as error:
            raise TrainingFailed(f"the trainer left no artifact: {error}") from error
    if artifact.model != model or artifact.architecture.kind != config.kind:
        raise TrainingFailed("the trainer left another artifact than it was asked for")
    return artifact


def _read_artifact(path: Path) -> LearnedArtifact:
    return load_learned(path.read_bytes())


def _write_job(
    path: Path, model: str, samples: Sequence[Sample], config: TrainingConfig, served: LearnedArtifact | None
) -> None:
    path.write_bytes(dump_job(Job(model, stack(samples), config, served)))


async def _run(command: Sequence[str], log: Path, timeout_s: float) -> None:
    """Until it has ended well. Raises TrainingFailed."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **_ONE_THREAD},
        )
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        raise TrainingFailed(f"the trainer was killed after {timeout_s:g} s", "timed_out") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code:
        said = await asyncio.to_thread(_last_line, log)
        raise TrainingFailed(f"the trainer ended with {code}: {said}")


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return lines[-1][:_MAX_LINE]
