"""What hears of the sequences of a batch engine."""

from __future__ import annotations

from typing import Protocol

from greenroom.policies.base.events import SequenceEnd, SequenceInfo


class SequenceObserver(Protocol):
    """Hears of each sequence, on the thread that steps: once that it is queued, once that it has ended, and between
    these that it has started, if it has. One that is preempted starts again later.
    """

    def sequence_queued(self, sequence: SequenceInfo) -> None: ...

    def sequence_started(self, sequence: SequenceInfo) -> None: ...

    def sequence_preempted(self, sequence: SequenceInfo) -> None:
        """It has given up its KV and waits. All its rows so far run again, as a prompt's, once it has started again."""
        ...

    def sequence_ended(self, sequence: int, end: SequenceEnd) -> None: ...

    def approximated(self, sequence: int, rows: int) -> float:
        """The share of the routing of its ``rows`` that was approximate. Asked once, just before ``sequence_ended``."""
        ...

    def idle(self) -> bool:
        """No request waits or runs: background work may go on. True: there is more of it."""
        ...

    def audit_idle(self) -> None:
        """No request waits or runs. Raises GreenroomError if something is still held."""
        ...
