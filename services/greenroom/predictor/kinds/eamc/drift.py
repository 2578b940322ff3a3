"""When an expert activation matrix collection is rebuilt (MoE-Infinity, §4.3, "Handling distribution shift"). Pure."""

from __future__ import annotations

import statistics

from greenroom.predictor.kinds.config import DriftConfig


class Drift:
    """Which of one model's sequences are recorded, and when there are enough of them.

    A sequence without a recall was foreseen by nothing, or by another collection than the one in use. Such sequences
    are recorded until the first collection is made, which is made of them. Later they say nothing.
    """

    def __init__(self, config: DriftConfig, *, made: bool) -> None:
        """``made``: whether a collection was made before."""
        self._config = config
        self._made = made
        self.low = 0
        """Recorded since the last one was made."""
        self.sequences = 0
        """All since then."""
        self._first: list[float] = []
        self.usual: float | None = None
        """Recall under the collection in use; None: not known yet."""

    def note(self, recall: float | None) -> bool:
        """One more sequence, with a recall from 0 to 1 if it has one. Whether it is to be recorded."""
        low = self._is_low(recall)
        self.sequences += 1
        self.low += low
        return low

    def _is_low(self, recall: float | None) -> bool:
        if recall is None:
            return not self._made
        if self.usual is None:
            self._first.append(recall)
            if len(self._first) == self._config.settle:
                self.usual = statistics.median(self._first)
            return recall < self._config.least
        return recall < max(self._config.least, self._config.share * self.usual)

    @property
    def due(self) -> bool:
        """Whether the collection is to be rebuilt now."""
        return self.low >= self._config.after or self.sequences >= self._config.again

    def begun(self) -> None:
        pass

    def made(self) -> None:
        """There is a new collection. What came while it was made was foreseen by the one before, and does not count."""
        self._made = True
        self.low = self.sequences = 0
        self._first.clear()
        self.usual = None

    def failed(self) -> int | None:
        return None
