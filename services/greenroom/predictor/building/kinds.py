"""The kinds of artifacts that are built: what is kept of a sequence, and when; ``job.BUILDERS`` has how."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.building.config import EAMC, REUSE, BuildingConfig
from greenroom.predictor.building.pace import EveryMany, Pace
from greenroom.predictor.eamc.drift import Drift
from greenroom.predictor.learned.samples import Picks, count_slots

Kept = npt.NDArray[np.integer[Any]]
"""Of one sequence, with the axes of its model behind the first."""


@dataclass(frozen=True, slots=True)
class Kind:
    """``keep(picks[rows, layers, k], experts)``: what is kept of a sequence; None: nothing can be learnt from it.
    ``pace(config, made)``: when it is built. ``needs``: a module without which it is not. ``options(config)``: what its
    builder is told, JSON."""

    file: type[ArtifactFile]
    keep: Callable[[Picks, int], Kept | None]
    pace: Callable[[BuildingConfig, bool], Pace]
    options: Callable[[BuildingConfig], Mapping[str, Any]]
    needs: str | None = None

    @property
    def lacking(self) -> str | None:
        """The module that it needs and that is not installed."""
        return self.needs if self.needs is not None and importlib.util.find_spec(self.needs) is None else None


def _matrix(picks: Picks, experts: int) -> Kept:
    """``[1, layers, experts]``: tokens by expert, the sequence's EAM."""
    counts = count_slots(picks, experts).sum(axis=1, dtype=np.int64)
    matrix: Kept = np.minimum(counts, 0xFFFF).astype(np.uint16)
    return matrix[None]


def _picks(picks: Picks, experts: int) -> Kept | None:
    """``[rows, layers, k]``, as they are; None where a row picks an expert twice."""
    ordered = np.sort(picks, axis=2)
    if ((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] < experts)).any():
        return None
    return picks.copy()  # what came off the wire is a view of the whole record


KINDS: Mapping[str, Kind] = {
    EAMC: Kind(
        EamcFile,
        _matrix,
        lambda config, made: Drift(config.drift, made=made),
        lambda config: {
            "capacity": config.capacity,
            "most": config.max_sequences,
            "after": config.drift.after,
            "seed": config.seed,
        },
        needs="faiss",
    ),
    REUSE: Kind(
        ReuseFile,
        _picks,
        lambda config, made: EveryMany(config.reuse_after, config.reuse_again, made),
        lambda config: {"seed": config.seed},
    ),
}
