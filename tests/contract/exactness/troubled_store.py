"""A pack whose reads are late and fail."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

from greenroom.experts.pack.pack_file import PackFile

LONGEST_DELAY_S = 0.0003
Doomed = Callable[[int, int], bool]


class TroubledStore:
    """A pack whose reads are late, and fail now and then, though never twice in a row: that, the link makes good.

    The first fetch of a ``doomed`` expert (layer, index) fails for good. ``made_good``: reads that failed once.
    """

    def __init__(self, pack: PackFile, doomed: Doomed, seed: int) -> None:
        self.manifest = pack.manifest
        self.made_good = 0
        self._pack = pack
        self._doomed = doomed
        self._noise = random.Random(seed)
        self._tries: Counter[tuple[int, int, int]] = Counter()
        self._lock = threading.Lock()
        self._never = threading.Event()

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        with self._lock:
            turn = self._tries[layer, expert, start]
            self._tries[layer, expert, start] += 1
            delay, unlucky = self._noise.random() * LONGEST_DELAY_S, self._noise.random() < 0.4
        self._never.wait(delay)
        buffer[:] = bytes(len(buffer))  # a read that fails may have written anything
        if start == 0 and turn < 2 and self._doomed(layer, expert):
            raise OSError(5, "injected for good")
        if turn % 2 == 0 and unlucky:
            self.made_good += 1
            raise OSError(5, "injected")
        self._pack.read_part(layer, expert, start, buffer)

    def is_checked(self, layer: int, expert: int) -> bool:
        return self._pack.is_checked(layer, expert)

    def check(self, layer: int, expert: int, record: memoryview) -> None:
        self._pack.check(layer, expert, record)
