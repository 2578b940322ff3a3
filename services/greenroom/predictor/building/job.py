"""The process that builds: ``python -m greenroom.predictor.building.job JOB ARTIFACT PARENT``, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from greenroom.predictor.apart import work
from greenroom.predictor.building.config import EAMC, REUSE

if TYPE_CHECKING:
    from greenroom.core.artifacts.artifact_file import ArtifactFile
    from greenroom.core.artifacts.eamc_file import EamcFile
    from greenroom.core.artifacts.reuse_file import ReuseFile
    from greenroom.predictor.building.jobs import Job


def build_eamc(job: Job) -> EamcFile:
    """Members out of the sequences that are kept; while those are few, out of the members before as well: they stand
    for sequences that are not here any more.

    When tasks have shifted, so that ``after`` were recorded, half of what members are chosen from is those: among all
    that came before the shift they would get hardly any. Raises InvalidConfig."""
    from greenroom.core.artifacts.eamc_file import EamcFile
    from greenroom.predictor.building.jobs import experts_of
    from greenroom.predictor.eamc.members import choose_members

    capacity, seed = int(job.options["capacity"]), int(job.options["seed"])
    most = 2 * job.recorded if job.recorded >= int(job.options["after"]) else int(job.options["most"])
    kept = job.kept[-most:]
    matrices = np.concatenate(kept).reshape(len(kept), -1).astype(np.float32)
    room = most - len(kept)
    if isinstance(job.earlier, EamcFile) and room > 0:
        matrices = np.concatenate((matrices, job.earlier.matrices[:room]))
    experts = experts_of(job.shape)
    members = choose_members(experts, matrices, capacity=capacity, seed=seed)
    return EamcFile(
        model=job.model,
        experts_per_layer=experts,
        matrices=matrices[members],
        sequences=len(matrices),
        report={"capacity": capacity, "seed": seed, "earlier": len(matrices) - len(kept)},
    )


def build_reuse(job: Job) -> ReuseFile:
    """Raises InvalidConfig, TraceError."""
    from greenroom.predictor.reuse.fit import FitOptions, fit
    from greenroom.replay.trace import RoutingTrace

    starts = np.concatenate(([0], np.cumsum([len(one) for one in job.kept])))
    trace = RoutingTrace(
        np.concatenate(job.kept), starts.astype(np.int64), num_experts=job.shape.experts, model=job.model
    )
    return fit(trace, FitOptions(seed=int(job.options["seed"])))


BUILDERS: Mapping[str, Callable[[Job], ArtifactFile]] = {EAMC: build_eamc, REUSE: build_reuse}


def _build(data: bytes) -> bytes:
    from greenroom.predictor.building.jobs import load_job

    job = load_job(data)
    return BUILDERS[job.kind](job).dump()


if __name__ == "__main__":
    work(_build)
