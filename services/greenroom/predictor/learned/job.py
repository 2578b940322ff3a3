"""The process that trains: ``python -m greenroom.predictor.learned.job JOB ARTIFACT PARENT``, on one thread."""

from __future__ import annotations

from greenroom.predictor.apart import work


def _train(data: bytes) -> bytes:
    from greenroom.predictor.learned.artifact import dump_learned
    from greenroom.predictor.learned.jobs import load_job
    from greenroom.predictor.learned.training import train

    job = load_job(data)
    return dump_learned(train(job.sequences, job.config, model=job.model, served=job.served))


if __name__ == "__main__":
    work(_train)
