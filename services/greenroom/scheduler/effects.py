"""What a pool's scheduler wants done. The service carries it out, and its result comes back as an input."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.attempts import Attempt
from greenroom.core.messages import Claim, Lost, Outcome, Task


@dataclass(frozen=True, slots=True)
class Append:
    """Append to the journal, then call ``Pool.append_ended`` whether it succeeded or not. Only what is read in the
    journal counts, so the pool asks again."""

    record: Claim | Lost | Outcome

    @property
    def request_id(self) -> str:
        """The request whose outcome it is; empty for other records."""
        return self.record.request_id if isinstance(self.record, Outcome) else ""


@dataclass(frozen=True, slots=True)
class WriteDeadLetter:
    """Write the request to the dead letters, until it is acknowledged; then ``Pool.dead_letter_written``."""

    request_id: str
    task: Task
    reason: str


@dataclass(frozen=True, slots=True)
class ListRuns:
    """Ask the worker what it runs; then ``Pool.listed``."""

    worker: str


@dataclass(frozen=True, slots=True)
class Run:
    """Start the task on the worker, or attach to its run there. Then ``Pool.result``, ``refused``, ``given_back`` or
    ``broken``."""

    worker: str
    attempt: Attempt
    task: Task


@dataclass(frozen=True, slots=True)
class CancelRun:
    """End the run on the worker if it is of this attempt or a lower one. Made once; it may be lost."""

    worker: str
    request_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome is in the journal: the worker may forget the result. Made once; it may be lost."""

    worker: str
    request_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The worker is lost: no lease is to be granted on its old connection."""

    worker: str


@dataclass(frozen=True, slots=True)
class Deposed:
    """Another scheduler holds the pool. This one holds nothing and does nothing until it takes over again."""

    by: str


Effect = Append | WriteDeadLetter | ListRuns | Run | CancelRun | Release | Disconnect | Deposed
