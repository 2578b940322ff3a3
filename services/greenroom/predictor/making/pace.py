"""When something is built, and when a build that failed is tried again. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pace(Protocol):
    """Of one model and kind."""

    def note(self, recall: float | None) -> bool:
        """One more sequence; ``recall``: its prefetch recall, if it has one. Whether it is to be recorded apart from
        the others: the next build must not be without it."""
        ...

    @property
    def due(self) -> bool: ...

    def built(self) -> None: ...


@dataclass(slots=True)
class EveryMany:
    """After the first ``after`` sequences, and once in ``again`` more. ``made``: whether there is one already."""

    after: int
    again: int
    made: bool = False
    sequences: int = 0

    def note(self, recall: float | None) -> bool:
        self.sequences += 1
        return False

    @property
    def due(self) -> bool:
        return self.sequences >= (self.again if self.made else self.after)

    def built(self) -> None:
        self.made, self.sequences = True, 0


@dataclass(slots=True)
class Retry:
    """Whatever failed is tried again after ``first_s``, and then after twice as long, up to ``longest_s``."""

    first_s: float
    longest_s: float
    not_before: float = 0.0
    _pause_s: float = 0.0

    def failed(self, now: float) -> float:
        """The seconds until it may be tried again."""
        self._pause_s = min(self.longest_s, max(self.first_s, 2 * self._pause_s))
        self.not_before = now + self._pause_s
        return self._pause_s

    def succeeded(self) -> None:
        self.not_before = self._pause_s = 0.0
