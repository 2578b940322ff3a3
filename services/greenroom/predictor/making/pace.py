"""When something is made, and when it is tried again after it failed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Pace(Protocol):
    """Of one model and kind."""

    def note(self, recall: float | None) -> bool:
        """One more sequence. ``recall``: the share of its picks that was foreseen, if that is known. Whether it is to
        be recorded apart from the others, since the next one must be made of it."""
        ...

    @property
    def due(self) -> bool: ...

    def begun(self) -> None:
        """It is being made now."""
        ...

    def made(self) -> None: ...

    def failed(self) -> int | None:
        """After how many more sequences it is tried again. None: it stays due."""
        ...


@dataclass(slots=True)
class EveryMany:
    """After the first ``after`` sequences, and each time ``again`` more have come since it was begun.

    ``is_made``: whether there is one already. ``retry_after``: sequences after which one that failed is tried again;
    None: it stays due.
    """

    after: int
    again: int
    is_made: bool = False
    retry_after: int | None = None
    sequences: int = 0
    _begun_at: int = 0

    def note(self, recall: float | None) -> bool:
        self.sequences += 1
        return False

    @property
    def due(self) -> bool:
        return self.sequences >= self._needed

    @property
    def _needed(self) -> int:
        return self.again if self.is_made else self.after

    def begun(self) -> None:
        self._begun_at = self.sequences

    def made(self) -> None:
        self.is_made = True
        self.sequences -= self._begun_at

    def failed(self) -> int | None:
        if self.retry_after is not None:
            self.sequences += self._needed - self.retry_after - self._begun_at
        return self.retry_after


@dataclass(slots=True)
class Retry:
    """What failed is tried again after ``first_s``, and then after twice as long each time, up to ``longest_s``.

    What took ``took_s`` until it was given up waits for nine times as long, if that is more. It will hardly fare better
    the next time, and so takes a tenth of a core at most.
    """

    first_s: float
    longest_s: float
    not_before: float = 0.0
    _pause_s: float = 0.0

    def failed(self, now: float, took_s: float = 0.0) -> float:
        """The seconds until it may be tried again."""
        self._pause_s = min(self.longest_s, max(self.first_s, 2 * self._pause_s))
        pause_s = max(self._pause_s, 9 * took_s)
        self.not_before = now + pause_s
        return pause_s

    def succeeded(self) -> None:
        self.not_before = self._pause_s = 0.0
