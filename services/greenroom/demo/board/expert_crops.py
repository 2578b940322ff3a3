"""Which experts a board needs, and the crops that each of them learns from and is judged by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.demo.board.component_types import ORIENTATIONS, SHARED, TYPES, ComponentType
from greenroom.demo.board.crops import Crop, Split, of_label, of_orientation


@dataclass(frozen=True, slots=True)
class Expert:
    """``types``: whose crops it sees: one, or those that share it. Its ``labels`` are in the order of its outputs."""

    name: str
    labels: tuple[str, ...]
    types: tuple[ComponentType, ...]
    shared: bool

    def crops_of(self, label: str, many: int, seed: int, split: Split) -> Iterator[Crop]:
        if self.shared:
            return of_orientation(self.types, label, many, seed, split)
        return of_label(self.types[0], label, many, seed, split)


@dataclass(frozen=True, slots=True)
class Labelled:
    """``crops[N, 64, 64, 3]`` uint8 and ``labels[N]``, places in the expert's labels."""

    crops: NDArray[np.uint8]
    labels: NDArray[np.int64]


def experts_of(types: Sequence[ComponentType] = TYPES) -> tuple[Expert, ...]:
    """One for each type, then those that these types share."""
    own = [Expert(one.name, one.labels, (one,), shared=False) for one in types]
    users = {name: tuple(one for one in types if one.orientation == name) for name in SHARED}
    return (*own, *(Expert(name, tuple(ORIENTATIONS), those, shared=True) for name, those in users.items() if those))
