"""The kind ``eamc``: the expert activation matrix collection that `moe-infinity` predicts by (MoE-Infinity, §4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.predictor.kinds.artifact_files import ArtifactFileKind, experts_of
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.eamc.drift import Drift
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.kind import History
from greenroom.predictor.traces.counts import Picks, count_slots
from greenroom.predictor.traces.samples import Kept


class EamcKind(ArtifactFileKind[EamcFile]):
    needs = ("faiss",)
    extra = "eamc"

    def __init__(self, config: BuildingConfig) -> None:
        super().__init__(EamcFile)
        self._config = config

    def keep(self, picks: Picks, experts: int) -> Kept:
        """[1, layers, experts]: tokens by expert, the sequence's EAM."""
        counts = count_slots(picks, experts).sum(axis=1, dtype=np.int64)
        matrix: Kept = np.minimum(counts, 0xFFFF).astype(np.uint16)
        return matrix[None]

    def pace(self, made: bool) -> Drift:
        return Drift(self._config.drift, made=made)

    def options(self) -> Mapping[str, Any]:
        return {
            "capacity": self._config.capacity,
            "most": self._config.max_sequences,
            "after": self._config.drift.after,
            "seed": self._config.seed,
        }

    def earlier(self, history: History[EamcFile], sequences: int) -> EamcFile | None:
        """Not what was made since the start: the sequences that it was made of are still here, and would count
        twice."""
        return history.inherited

    def make(self, job: Job) -> EamcFile:
        """Choose members from the sequences that are kept. While those are few, from the members of ``job.earlier`` as
        well, which stand for sequences that are not here any more.

        When tasks have shifted, so that ``after`` sequences were recorded, those are half of what members are chosen
        from: among all that came before the shift they would get hardly any. Raises InvalidConfig."""
        from greenroom.predictor.kinds.eamc.members import choose_members

        capacity, seed = int(job.options["capacity"]), int(job.options["seed"])
        most = 2 * job.recorded if job.recorded >= int(job.options["after"]) else int(job.options["most"])
        kept = [one.array for one in job.samples[-most:]]
        matrices = np.concatenate(kept).reshape(len(kept), -1).astype(np.float32)
        room = most - len(kept)
        if job.earlier and room > 0:
            matrices = np.concatenate((matrices, self.codec.load(job.earlier).matrices[:room]))
        experts = experts_of(job.shape)
        members = choose_members(experts, matrices, capacity=capacity, seed=seed)
        return EamcFile(
            model=job.model,
            experts_per_layer=experts,
            matrices=matrices[members],
            sequences=len(matrices),
            report={"capacity": capacity, "seed": seed, "earlier": len(matrices) - len(kept)},
        )
