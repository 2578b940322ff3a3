"""The interface of a log: partitioned topics, appends with an acknowledgement, groups, readers."""

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
    """The log does not take this record: it is too large, or against the topic's rules. The record is certainly not
    there, and sending it again does not help."""


class AppendNotSent(LogError):
    """The record was never sent: no broker took it in time, or there is no room now. The record is certainly not
    there, and the same append may succeed later."""


class AppendUnknown(LogError):
    """No acknowledgement came in time. The record may be in the log, or yet land there."""


class LogUnavailable(LogError):
    """The log did not answer in time. The same call may succeed later."""


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
    """Told by a consumer, on its event loop, which partitions it holds. Both methods may await, within the group's
    session.

    They are called one after the other, never with no partitions. All held partitions are revoked at once: in every
    rebalance, even where most of them are assigned again, and when the consumer is closed. An error that they raise
    makes ``poll`` fail.
    """

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        """These partitions are ours from now on, each from its committed offset (else its earliest). ``poll`` returns
        no record of them before this has returned."""
        ...

    async def revoked(self, partitions: Sequence[int]) -> None:
        """These are no longer ours: the next holder reads again what is not committed. Until this returns they can
        still be committed."""
        ...


class GroupConsumer(Protocol):
    """One member of a group on one topic. It stays a member while it is open, however slow its user is.

    Starts from the committed offset, else the earliest. Only ``commit`` commits. Entering waits until the group has
    taken it in, with partitions or without. Only one ``poll`` at a time.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        """The next records, in order within each partition; empty after ``timeout_s``. Raises LogFailed.

        Cancelling it loses no record. While the log is away it returns none, and goes on by itself afterwards."""
        ...

    async def commit(self, positions: Mapping[int, int]) -> bool:
        """Commit the next offset to read, by partition. Commits never go back: a position before one that this member
        has committed is passed over.

        False: nothing is known to be committed, since this member does not hold all of them (any more), or the log did
        not answer. A later commit covers it. Raises LogFailed."""
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
        """As GroupConsumer's. ``position`` may pass offsets without a record, which compaction has emptied."""
        ...

    async def end(self) -> int:
        """The offset of the next append, as the broker has it now. Every append that was acknowledged before the call
        is before it. Raises LogUnavailable, LogFailed."""
        ...


class Log(Protocol):
    """A connection to the log. The log puts a configured prefix before every topic and group name; records carry the
    names without it. Entering waits until the log answers, with a bound, after which it raises LogUnavailable.

    Consumers and readers are closed before the log that made them.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def ensure(self, topics: Sequence[Topic]) -> None:
        """Create the topics that are absent. Raises LogFailed where an existing topic breaks the protocol: fewer
        partitions, stamped by the producer, compaction where there must be none (or none where there must be), a
        smaller largest message. Raises LogUnavailable."""
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
        """Append, acknowledged by all replicas. Where no partition is named it follows from the key, the same one for
        the same key. A record without a value needs a key.

        Raises AppendRefused (not there, and never will be: too large), AppendNotSent (not there; may succeed later),
        AppendUnknown (it may be there, or land there later), LogFailed (not there: not authorised, fenced, no such
        topic)."""
        ...

    def group(self, topic: str, group: str, assignment: Assignment) -> GroupConsumer: ...

    def reader(self, topic: str, partition: int, *, start: int | None = None) -> Reader:
        """From ``start`` on; None: from the earliest that is retained."""
        ...

    async def partitions(self, topic: str) -> int:
        """How many partitions the topic has. This and the methods below raise LogUnavailable, and LogFailed for no such
        topic."""
        ...

    async def identity(self, topic: str) -> str:
        """The id of this topic: another one after it was deleted and made anew under its name. Empty where the log has
        no such ids."""
        ...

    async def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """The offset of the first record stamped at or after ``timestamp_ms``; the end where there is none."""
        ...

    async def committed(self, topic: str, group: str, partition: int) -> int | None:
        """The next offset that the group would read; None where it has committed none."""
        ...
