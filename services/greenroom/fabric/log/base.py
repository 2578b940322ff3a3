"""What a log is to a service: partitioned topics, appends with an acknowledgement, groups, readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from greenroom.core.errors import GreenroomError

Headers = Sequence[tuple[str, bytes]]


class LogError(GreenroomError):
    """Base of what a log raises."""


class AppendRefused(LogError):
    """The log does not take this record: it is too large, or against the topic's rules. It is certainly not there,
    and sending the same again does not help."""


class AppendNotSent(LogError):
    """The record was never sent: no broker took it in time, or there is no room now. It is certainly not there, and
    the same append may succeed later."""


class AppendUnknown(LogError):
    """No acknowledgement came in time. The record may be in the log, or yet land there."""


class LogUnavailable(LogError):
    """The log did not answer in time. Nothing was changed that matters; the same call may succeed later."""


class LogFailed(LogError):
    """The log can not be used further by this object: fenced, not authorised, offset out of range, no such topic.
    Fatal, by design: an offset out of range is never answered by skipping to the newest (rule 11)."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is created where it is absent. Times in milliseconds, None: the broker's own setting.

    ``compacted``: keeps the last record of every key for ever. All topics are stamped by the broker on append.
    """

    name: str
    partitions: int = 1
    retention_ms: int | None = None
    compacted: bool = False
    max_message_bytes: int = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Position:
    """Where a record landed."""

    partition: int
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read. ``value`` None: a compacted topic's tombstone."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = field(default=())


class Assignment(Protocol):
    """Told by a consumer, on its event loop, what it holds. Both may await, within the group's session.

    Called in turn, never both at once, and never with nothing. All that is held is revoked at once, also where most of
    it comes back in the next breath, and when the consumer is closed. What they raise makes ``poll`` fail.
    """

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        """These partitions are ours from now on, each from its committed offset (else its earliest). ``poll`` gives
        nothing of them before this has returned."""
        ...

    async def revoked(self, partitions: Sequence[int]) -> None:
        """These are no longer ours: what is not committed will be read again by whoever gets them. Until this returns
        they can still be committed."""
        ...


class GroupConsumer(Protocol):
    """One member of a group on one topic. It stays a member by itself while it is open, however slow its user is.

    Starts from the committed offset, else the earliest. Nothing is committed but by ``commit``. Entering waits until
    the group has taken it in, holding partitions or none. Only one ``poll`` at a time.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        """What has come, in order within each partition; empty after ``timeout_s``. Raises LogFailed.

        Cancelling it loses nothing. While the log is away it finds nothing, and goes on by itself afterwards."""
        ...

    async def commit(self, positions: Mapping[int, int]) -> bool:
        """Commit the next offset to read, by partition. A position before one that this member has committed is
        passed over: commits never go back.

        False: nothing is known to be committed, for this member does not hold all of them (any more), or the log did
        not answer. Whatever commits later covers it. Raises LogFailed."""
        ...

    def pause(self, partitions: Sequence[int]) -> None:
        """Read no more from these until ``resume``; holds across a rebalance that leaves them here."""
        ...

    def resume(self, partitions: Sequence[int]) -> None: ...

    @property
    def assignment(self) -> frozenset[int]: ...


class Reader(Protocol):
    """Reads one partition by itself, outside any group, and goes on with what is appended. One ``poll`` at a time."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @property
    def position(self) -> int:
        """The next offset that ``poll`` will give."""
        ...

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        """As GroupConsumer's. ``position`` may pass over offsets that compaction has emptied, without a record."""
        ...

    async def end(self) -> int:
        """The offset that the next append would get, as the broker has it now: all appends that were acknowledged
        before the call are before it. Raises LogUnavailable, LogFailed."""
        ...


class Log(Protocol):
    """A connection to the log. A prefix of one's choice is put before every topic and group name by the log itself;
    records carry the names without it. Entering waits, with a bound, until the log answers: LogUnavailable.

    Consumers and readers are closed before the log that made them.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def ensure(self, topics: Sequence[Topic]) -> None:
        """Create what is absent. Raises LogFailed where one that is there contradicts what is asked in a way that
        breaks the protocol: fewer partitions, stamped by the producer, compaction where there must be none (or none
        where there must be), a smaller largest message. Raises LogUnavailable."""
        ...

    async def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        timeout_s: float = 10.0,
    ) -> Position:
        """Append, acknowledged by all replicas. The partition follows from the key where none is named, the same one
        for the same key. A record without a value needs a key.

        Raises AppendRefused (not there, and never will be: too large), AppendNotSent (not there; later again),
        AppendUnknown (it may be there, or yet land there), LogFailed (not authorised, fenced, no such topic; not
        there)."""
        ...

    def group(self, topic: str, group: str, assignment: Assignment) -> GroupConsumer: ...

    def reader(self, topic: str, partition: int, *, start: int | None = None) -> Reader:
        """From ``start`` on; None: from the earliest that is retained."""
        ...

    async def partitions(self, topic: str) -> int:
        """How many the topic has. This and those below raise LogUnavailable, and LogFailed for no such topic."""
        ...

    async def identity(self, topic: str) -> str:
        """What this topic is told by from any other, one that was made anew under its name included. Empty where the
        log has no such thing."""
        ...

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """The offset of the first record stamped at or after ``timestamp_ms``; the end where there is none."""
        ...

    async def committed(self, topic: str, group: str, partition: int) -> int | None:
        """The next offset that the group would read; None where it has committed none."""
        ...
