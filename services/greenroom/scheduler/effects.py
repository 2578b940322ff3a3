"""What a pool's scheduler wants done. Carried out by the service; what comes of it comes back as an input."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.attempts import Attempt
from greenroom.core.messages import Claim, Lost, Outcome, Task


@dataclass(frozen=True, slots=True)
class Append:
    """Append to the journal; then ``Pool.append_ended``, whatever came of it. What counts is what is read there, and
    the pool asks again."""

    record: Claim | Lost | Outcome

    @property
    def request_id(self) -> str:
        """Whose outcome it is; empty for what is of no request."""
        return self.record.request_id if isinstance(self.record, Outcome) else ""


@dataclass(frozen=True, slots=True)
class Bury:
    """Write the request to the dead letters, until it is acknowledged; then ``Pool.buried``."""

    request_id: str
    task: Task
    reason: str


@dataclass(frozen=True, slots=True)
class ListRuns:
    """Ask the worker what it runs; then ``Pool.listed``."""

    worker: str


@dataclass(frozen=True, slots=True)
class Run:
    """Start the task on the worker, or attach to what runs of it there. Then ``Pool.result``, ``refused``,
    ``given_back`` or ``broken``."""

    worker: str
    attempt: Attempt
    task: Task


@dataclass(frozen=True, slots=True)
class CancelRun:
    """End the run on the worker if it is of this attempt or a lower one. Best effort."""

    worker: str
    request_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Release:
    """The outcome is in the journal: the worker may forget the result. Best effort."""

    worker: str
    request_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Disconnect:
    """The worker has been declared lost: no lease is to be granted on its old connection."""

    worker: str


@dataclass(frozen=True, slots=True)
class Deposed:
    """Another scheduler holds the pool. This one keeps nothing and does nothing until it takes over again."""

    by: str


Effect = Append | Bury | ListRuns | Run | CancelRun | Release | Disconnect | Deposed
