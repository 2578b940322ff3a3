"""When an expert activation matrix collection is rebuilt (MoE-Infinity, §4.3, "Handling distribution shift"). Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from greenroom.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftConfig:
    """``share``: a sequence has been foreseen too badly if its prefetch recall is below this share of what is usual
    under the collection in use: the median of the first ``settle`` sequences, since what is good is another number for
    each model. ``least``: or if it is below this, whatever is usual. ``after``: so many of those, and the collection is
    rebuilt; ``again``: so many sequences of any kind, and it is too. Raises InvalidConfig, naming the field.
    """

    share: float = 0.9
    least: float = 0.0
    after: int = 100
    again: int = 1000
    settle: int = 50

    def __post_init__(self) -> None:
        for name in ("share", "least"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidConfig(f"eamc_{name}", getattr(self, name), "a share, 0 to 1")
        for name in ("after", "again", "settle"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"eamc_{name}", getattr(self, name), "a number of sequences from 1")


class Drift:
    """Of one model's sequences, which are recorded, and when there are enough of them.

    One without a recall had nothing that it could be foreseen by, or something else than the collection in use. Where
    none was ever made of the model's traces such are recorded, so that the first one is; later it says nothing.
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

    def built(self) -> None:
        """There is a new one. What came while it was made was foreseen by the one before, and counts no more."""
        self._made = True
        self.low = self.sequences = 0
        self._first.clear()
        self.usual = None
