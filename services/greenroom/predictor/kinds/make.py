"""The process that makes an artifact: ``python -m greenroom.predictor.kinds.make JOB ARTIFACT PARENT``."""

from __future__ import annotations

from typing import Any

from greenroom.predictor.kinds.config import BuildingConfig, LearningConfig
from greenroom.predictor.kinds.registry import FORECAST_KINDS, POLICY_KINDS
from greenroom.predictor.making.job import load_job
from greenroom.predictor.making.kind import Kind
from greenroom.predictor.making.subprocess_job import work


def make_file(data: bytes) -> bytes:
    """The artifact's file, from the job's."""
    job = load_job(data)
    kind: Kind[Any]
    if job.kind in FORECAST_KINDS:
        kind = FORECAST_KINDS[job.kind](LearningConfig())
    else:
        kind = POLICY_KINDS[job.kind](BuildingConfig())
    return kind.codec.dump(kind.make(job))


if __name__ == "__main__":
    work(make_file)
