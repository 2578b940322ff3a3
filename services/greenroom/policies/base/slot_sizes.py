"""How a tier's memory is cut into slots where records differ in size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.units import format_bytes
from greenroom.policies.base.array_types import Counts, Keys, Mask
from greenroom.policies.base.expert_keys import Catalogue


class SlotSizes:
    """The slots that a tier of any size has for the experts of a catalogue. Immutable.

    Experts whose records have one size are a *size class*. It has slots of that size, and no other expert is ever in
    them. Slots are given in one order, whatever the budget: one of each class, then in turns until each has as many as
    its layers' routers pick, then so that all classes hold the same share of their experts. So a number of slots says
    everything, more slots never take one from a class, and a tier's slots lie in memory in the order in which they are
    given.

    ``class_of[expert]``: by ascending size. ``bytes_of[class]``: of a slot. ``picked[class]``: the most experts that a
    router of its layers picks. ``order[slots]``: the class of each slot, up to as many as there are experts.
    ``members[class]``: a mask of the experts.
    """

    __slots__ = ("_ends", "bytes_of", "class_of", "classes", "experts", "members", "order", "picked")

    def __init__(self, catalogue: Catalogue) -> None:
        sizes, class_of = np.unique(catalogue.bytes_of, return_inverse=True)
        self.experts = catalogue.size
        self.classes = len(sizes)
        self.class_of: Counts = class_of
        self.bytes_of: Counts = sizes
        self.members: tuple[Mask, ...] = tuple(class_of == number for number in range(self.classes))
        top_k = catalogue.top_k[catalogue.layer_of]
        self.picked: Counts = np.array([top_k[own].max() for own in self.members])
        self.order: Counts = _order(np.bincount(class_of), self.picked)
        self._ends: NDArray[np.int64] = np.concatenate(([0], np.cumsum(sizes[self.order])))
        for array in (self.class_of, self.bytes_of, self.picked, self.order, self._ends, *self.members):
            array.setflags(write=False)

    @classmethod
    def uniform(cls, experts: int, *, nbytes: int = 1, top_k: int = 1) -> SlotSizes:
        """Of experts that are all alike."""
        return cls(Catalogue.uniform("model", layers=1, experts=experts, top_k=top_k, expert_bytes=nbytes))

    @property
    def least(self) -> int:
        """The fewest slots to run with: as many as a router picks, and one of each class.

        With fewer of a class than its routers pick, its layers run in waves.
        """
        return max(int(self.picked.max()), self.classes)

    @property
    def all_bytes(self) -> int:
        """Of as many slots as there are experts."""
        return int(self._ends[-1])

    @property
    def mean_bytes(self) -> int:
        """Of one expert, the mean of all."""
        return self.all_bytes // self.experts

    def nbytes(self, slots: int) -> int:
        """Of the first ``slots``."""
        return int(self._ends[slots])

    def within(self, nbytes: int) -> int:
        """How many slots ``nbytes`` hold, at most one for each expert."""
        return max(0, int(np.searchsorted(self._ends, nbytes, side="right")) - 1)

    def host_slots(self, nbytes: int) -> int:
        """As ``within``, of a tier that experts pass: none, where there is not one of each class."""
        slots = self.within(nbytes)
        return slots if slots >= self.classes else 0

    def slot_bytes(self, slots: int) -> list[int]:
        """Of each of the first ``slots``."""
        found: list[int] = self.bytes_of[self.order[:slots]].tolist()
        return found

    def describe(self) -> str:
        """The sizes as a person reads them."""
        least, most = format_bytes(self.bytes_of[0]), format_bytes(self.bytes_of[-1])
        return least if self.classes == 1 else f"{least} to {most}"

    def say_least(self) -> str:
        """Why ``least`` are needed."""
        picked = int(self.picked.max())
        return f"one layer's router picks {picked}" if picked >= self.classes else f"there are {self.classes} sizes"

    def places(self, slots: int) -> Counts:
        """``[classes]``: how many of the first ``slots`` each has."""
        return np.bincount(self.order[:slots], minlength=self.classes)

    def placed(self, ranked: Keys, places: Counts) -> Keys:
        """Those of the distinct experts ``ranked`` that get one of the ``places[classes]``: the first ones of each
        class, in their order.
        """
        if self.classes == 1:
            return ranked[: int(places[0])]
        class_of, chosen = self.class_of[ranked], np.zeros(len(ranked), dtype=np.bool_)
        for number, count in enumerate(places.tolist()):
            chosen[np.flatnonzero(class_of == number)[:count]] = True
        return ranked[chosen]


def _order(experts: Counts, picked: Counts) -> Counts:
    """The class of each slot, for classes of so many ``experts`` whose routers pick so many."""
    classes = np.repeat(np.arange(len(experts)), experts)
    number = np.arange(len(classes)) - np.repeat(np.cumsum(experts) - experts, experts)
    turn = np.where(number == 0, 0, np.where(number < picked[classes], 1, 2))
    within = np.where(turn == 2, (number + 1) / experts[classes], number)
    return np.asarray(classes[np.lexsort((classes, within, turn))])
