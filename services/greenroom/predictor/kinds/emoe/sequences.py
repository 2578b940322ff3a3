"""What eMoE's predictors learn from: how each sequence's picks spread over the experts, slot by slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from greenroom.predictor.traces.counts import Counts, Floats, Picks, count_slots
from greenroom.predictor.traces.samples import Sample


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of one model in the order of their arrival. ``counts``: [n, layers, k, experts]."""

    tasks: tuple[str, ...]
    counts: Counts

    def __post_init__(self) -> None:
        if self.counts.ndim != 4 or len(self.counts) != len(self.tasks) or 0 in self.counts.shape[1:]:
            raise ValueError(f"counts of shape {self.counts.shape} for {len(self.tasks)} sequences")

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def slots(self) -> int:
        return int(self.counts.shape[2])

    @property
    def experts(self) -> int:
        return int(self.counts.shape[3])

    def previous(self) -> npt.NDArray[np.int64]:
        """For each sequence the last one before it of its task type; -1: it is the first."""
        last: dict[str, int] = {}
        places = []
        for place, task in enumerate(self.tasks):
            places.append(last.get(task, -1))
            last[task] = place
        return np.asarray(places, np.int64)

    def by_slot(self) -> Floats:
        """[n, layers, k, experts]: shares, 1 in sum, or all 0 where a slot has no pick."""
        return _shares(self.counts)

    def by_layer(self) -> Floats:
        """[n, layers, experts]: a layer's picks over its experts, 1 in sum, or all 0 where it has none."""
        return _shares(self.counts.sum(axis=2, dtype=np.int64))


def _shares(counts: npt.NDArray[np.integer]) -> Floats:
    totals = counts.sum(axis=-1, keepdims=True, dtype=np.int64)
    shares: Floats = (counts / np.maximum(totals, 1)).astype(np.float32)
    return shares


def stack(samples: Sequence[Sample]) -> Sequences:
    """``samples``: at least one, each of an array [1, layers, k, experts]."""
    return Sequences(tuple(one.task for one in samples), np.concatenate([one.array for one in samples]))


def sequences_of(experts: Picks, starts: Iterable[int], tasks: Sequence[str], num_experts: int) -> Sequences:
    """Of a recorded trace: ``experts`` [tokens, layers, k], sequence i its rows from starts[i] to starts[i + 1].
    Sequences without a row are left out."""
    places = [int(start) for start in starts]
    return stack([
        Sample(task, count_slots(experts[begin:end], num_experts)[None])
        for task, begin, end in zip(tasks, places, places[1:], strict=False)
        if end > begin
    ])  # fmt: skip
