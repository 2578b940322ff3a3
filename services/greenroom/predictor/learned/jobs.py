"""A training as a file that goes to a process of its own, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.predictor.learned.artifact import LearnedArtifact, load_learned
from greenroom.predictor.learned.config import TrainingConfig
from greenroom.predictor.learned.samples import Sample, Sequences, stack
from greenroom.predictor.tensors import Damaged, dump_tensors, load_tensors

TRAINER = (sys.executable, "-m", "greenroom.predictor.learned.job")
"""Started with the file of its job, the one to write its artifact to, and the process without which it ends."""
_FORMAT = "greenroom-training"
_MAX_LINE = 500
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class TrainingFailed(GreenroomError):
    """The trainer ended without an artifact. ``why``: a word for metrics."""

    def __init__(self, message: str, why: str = "failed") -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    model: str
    sequences: Sequences
    config: TrainingConfig


def dump_job(job: Job) -> bytes:
    metadata = {
        "format": _FORMAT,
        "model": job.model,
        "tasks": json.dumps(job.sequences.tasks),
        "config": json.dumps(asdict(job.config)),
    }
    return dump_tensors({"counts": job.sequences.counts}, metadata)


def load_job(data: bytes) -> Job:
    """Raises Damaged."""
    arrays, metadata = load_tensors(data)
    try:
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r:.50}")
        sequences = Sequences(tuple(json.loads(metadata["tasks"])), arrays["counts"])
        return Job(metadata["model"], sequences, TrainingConfig(**json.loads(metadata["config"])))
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError, InvalidConfig) as error:
        raise Damaged(f"it is no training: {error!r:.200}") from error


async def train_apart(
    model: str,
    samples: Sequence[Sample],
    config: TrainingConfig,
    *,
    timeout_s: float,
    command: Sequence[str] = TRAINER,
) -> LearnedArtifact:
    """In a process of its own, which is killed after ``timeout_s`` or when this is cancelled. Raises TrainingFailed,
    OSError."""
    with tempfile.TemporaryDirectory(prefix="greenroom-training-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        source, target = folder / "job.safetensors", folder / "artifact.safetensors"
        await asyncio.to_thread(_write_job, source, model, samples, config)
        await _run([*command, str(source), str(target), str(os.getpid())], folder / "log", timeout_s)
        try:
            artifact = load_learned(await asyncio.to_thread(target.read_bytes))
        except (OSError, Damaged) as error:
            raise TrainingFailed(f"the trainer left no artifact: {error}") from error
    if artifact.model != model or artifact.architecture.kind != config.kind:
        raise TrainingFailed("the trainer left another artifact than it was asked for")
    return artifact


def _write_job(path: Path, model: str, samples: Sequence[Sample], config: TrainingConfig) -> None:
    path.write_bytes(dump_job(Job(model, stack(samples), config)))


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
    lines = log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return lines[-1][:_MAX_LINE]
