"""What is expected of a task type before anything is learnt: how often each expert came. The rarer the type, the nearer
to all types together. Learned predictors learn what is to be added to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from greenroom.predictor.kinds.emoe.sequences import Sequences
from greenroom.predictor.traces.counts import Floats

ALL_TASKS = ""
MAX_TASKS = 63
_WEIGHT_OF_ALL = 2.0
"""How many sequences all types together count as, in what is expected of one type."""
_WEIGHT_OF_NONE = 0.5
"""How many sequences the uniform distribution counts as, in what is expected of all types."""


@dataclass(frozen=True, slots=True, eq=False)
class Priors:
    """``tasks``: the first is all of them together. ``by_slot``: [tasks, layers, k, experts], 1 in sum over experts,
    none 0. ``slots``: [layers, k]: the share that a slot has of its layer's picks, 1 in sum: 0 for a slot that the
    layer does not use."""

    tasks: tuple[str, ...]
    by_slot: Floats
    slots: Floats

    @property
    def by_layer(self) -> Floats:
        """[tasks, layers, experts], 1 in sum."""
        found: Floats = np.einsum("tlke,lk->tle", self.by_slot, self.slots, dtype=np.float32)
        return found

    def number(self, task: str) -> int:
        """0 for a type that is not known."""
        return self.tasks.index(task) if task in self.tasks else 0


def tasks_of(sequences: Sequences) -> tuple[str, ...]:
    """All together, and the ``MAX_TASKS`` most frequent ones, which have priors of their own."""
    frequent = [task for task, _ in Counter(sequences.tasks).most_common(MAX_TASKS + 1) if task != ALL_TASKS]
    return (ALL_TASKS, *sorted(frequent[:MAX_TASKS]))


def priors_of(sequences: Sequences, tasks: tuple[str, ...]) -> Priors:
    shares = sequences.by_slot()
    everything = _with_uniform(shares)
    by_slot = [everything]
    for task in tasks[1:]:
        mine = shares[[one == task for one in sequences.tasks]]
        by_slot.append(_mixed(mine.sum(axis=0), _present(mine), everything))
    present = sequences.counts.sum(axis=(0, 3), dtype=np.int64)
    slots = present / np.maximum(present.sum(axis=1, keepdims=True), 1)
    slots[present.sum(axis=1) == 0] = 1 / sequences.slots
    return Priors(tasks, np.stack(by_slot), slots.astype(np.float32))


def without_each(sequences: Sequences, priors: Priors, numbers: npt.NDArray[np.int64]) -> Floats:
    """[n, layers, k, experts]: for each sequence, what is expected of its type by all other sequences. A prior that
    knew the sequence itself would look better in training than it is. ``numbers``: of the types, in ``priors``."""
    shares = sequences.by_slot()
    expected = priors.by_slot[numbers].copy()
    for number in range(1, len(priors.tasks)):
        mine = np.flatnonzero(numbers == number)
        if len(mine):
            total, present = shares[mine].sum(axis=0), _present(shares[mine])
            for place in mine:
                one = shares[place]
                expected[place] = _mixed(total - one, present - _present(one[None]), priors.by_slot[0])
    return expected


def _present(shares: Floats) -> Floats:
    """[layers, k, 1]: how many sequences have a pick there."""
    count: Floats = (shares.sum(axis=-1, keepdims=True) > 0).sum(axis=0).astype(np.float32)
    return count


def _with_uniform(shares: Floats) -> Floats:
    return _mixed(shares.sum(axis=0), _present(shares), np.float32(1 / shares.shape[-1]), _WEIGHT_OF_NONE)


def _mixed(total: Floats, count: Floats, general: Floats | np.float32, weight: float = _WEIGHT_OF_ALL) -> Floats:
    mixed: Floats = ((np.maximum(total, 0) + weight * general) / (count + weight)).astype(np.float32)
    return mixed
