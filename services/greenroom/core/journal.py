"""Which records of a pool's journal count: the one definition that schedulers and gateways share. No I/O.

A scheduler that was paused, or whose producer retries late, may append after another has taken over. So no record
counts by itself: every reader decides by the same rules, from the order of the records alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from greenroom.core.messages.journal import Claim, JournalRecord, Lost, Outcome


class Verdict(StrEnum):
    """Whether a record counts for a reader."""

    COUNTS = "counts"
    VOID = "void"
    """Of an epoch that is over, or a claim that another came before."""
    UNDECIDED = "undecided"
    """It depends on records before this reader's start, so nothing follows from it."""


@dataclass(slots=True)
class JournalFold:
    """Reads one partition in order.

    ``start``: the offset of the first record that this reader gets; 0, or later where older ones have been deleted
    or are of no interest. A reader that starts late is undecided until it meets a claim whose ``read_to`` is neither
    before its start nor before a claim that it met. Schedulers claim again at intervals, so it soon does.

    The rules: a claim stands if no other standing claim lies between its ``read_to`` and its own offset. That offset is
    the epoch. A loss or an outcome counts if its epoch is that of the last standing claim before it. Offsets may have
    gaps.
    """

    start: int = 0
    next_offset: int = 0
    """All before this offset has been read: the ``read_to`` of a claim made now."""
    epoch: int | None = None
    """Offset of the last claim that stands, None before the first."""
    holder: str | None = None
    """The scheduler that made it."""
    _known_from: int = field(default=0, repr=False)
    """While ``epoch`` is None: every claim from this offset on has been judged."""

    def __post_init__(self) -> None:
        self._known_from = self.start
        self.next_offset = max(self.next_offset, self.start)

    def read(self, offset: int, record: JournalRecord) -> Verdict:
        """Judge the record at ``offset``. Raises ValueError for a record that was read already."""
        if offset < self.next_offset:
            raise ValueError(f"journal record {offset} after {self.next_offset - 1}")
        self.next_offset = offset + 1
        match record:
            case Claim():
                return self._claim(offset, record)
            case Lost() | Outcome():
                if self.epoch is None:
                    return Verdict.UNDECIDED
                return Verdict.COUNTS if record.epoch == self.epoch else Verdict.VOID

    def skip(self, offset: int) -> None:
        """The record at ``offset`` can not be decoded."""
        self.next_offset = max(self.next_offset, offset + 1)

    def _claim(self, offset: int, claim: Claim) -> Verdict:
        if claim.read_to > offset:
            return Verdict.VOID  # no reader of this journal can have written it
        if self.epoch is None and claim.read_to < self._known_from:
            self._known_from = offset + 1
            return Verdict.UNDECIDED
        if self.epoch is not None and self.epoch >= claim.read_to:
            return Verdict.VOID
        self.epoch, self.holder = offset, claim.scheduler
        return Verdict.COUNTS
