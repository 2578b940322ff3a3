"""The process that trains: ``python -m greenroom.predictor.kinds.emoe.job JOB ARTIFACT PARENT``, on one thread."""

from __future__ import annotations

from greenroom.predictor.making.subprocess_job import work


def _train(data: bytes) -> bytes:
    from greenroom.predictor.kinds.emoe.artifact import dump_learned
    from greenroom.predictor.kinds.emoe.jobs import load_job
    from greenroom.predictor.kinds.emoe.training import train

    job = load_job(data)
    return dump_learned(train(job.sequences, job.config, model=job.model, served=job.served))


if __name__ == "__main__":
    work(_train)
