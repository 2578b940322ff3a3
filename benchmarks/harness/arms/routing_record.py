"""What follows from the routing of a turn: Belady's misses, and the bytes that its forwards have to read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.turn import Trace
from greenroom.policies.base.events import SequenceInfo, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.replacement.belady import Future, belady

Keys = NDArray[np.int64]


class RoutingRecord:
    """The engine's ``listener``. It keeps one group of distinct experts for each layer of a step."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self.groups: list[Keys] = []
        self.steps: set[int] = set()

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        pass

    def sequence_preempted(self, sequence: int) -> None:
        pass

    def layer_routed(self, step: Step, layer: int, picks: NDArray[np.integer]) -> None:
        span = self._catalogue.span(layer)
        distinct = np.unique(picks)
        self.groups.append(distinct[distinct < span.stop - span.start].astype(np.int64) + span.start)
        self.steps.add(step.number)

    def step_ended(self, step: Step, *, failed: bool) -> None:
        pass

    def sequence_reported(self, sequence: int, report: Mapping[str, float]) -> None:
        pass

    def future(self, times: int) -> Future:
        """The accesses of the recorded turn, ``times`` over."""
        return Future.of_groups(self.groups * times)

    def trace(self, slots: int, dense_bytes: int) -> Trace:
        """Of an arm of so many ``slots``, whose dense weights have ``dense_bytes``."""
        accesses = np.concatenate([*self.groups, np.empty(0, dtype=np.int64)])
        sizes = SlotSizes(self._catalogue)
        class_of = sizes.class_of[accesses]
        misses = [
            steady_misses(accesses[class_of == number], places)
            for number, places in enumerate(sizes.places(slots).tolist())
        ]
        touched = int(self._catalogue.bytes_of[accesses].sum())
        return Trace(
            accesses=len(accesses),
            belady_bytes=int(np.dot(misses, sizes.bytes_of)),
            bytes_touched=len(self.steps) * dense_bytes + touched,
        )


def steady_misses(accesses: Keys, slots: int) -> int:
    """Misses of Belady's choice in the second of three equal runs. The first run fills; the last keeps nothing for
    later."""
    if not len(accesses):
        return 0
    hits = belady(np.tile(accesses, 3), slots)
    return int(np.count_nonzero(~hits[len(accesses) : 2 * len(accesses)]))
