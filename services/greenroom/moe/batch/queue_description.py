"""The batch policy's view of the sequences that wait and run, updated as they change."""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.moe.attention.kv_cache import KVLayout
from greenroom.moe.batch.sequence import Sequence
from greenroom.policies.batching.batch_policy import RunningSequence, WaitingSequence


class QueueDescription:
    """A sequence is described anew when it comes, when it starts, and when rows of its prompt have run.

    While it waits or decodes, its description stays the same, so a step costs nothing for it.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._waiting: dict[int, WaitingSequence] = {}
        self._running: dict[int, RunningSequence] = {}
        self._waiting_told: tuple[WaitingSequence, ...] | None = ()
        self._running_told: tuple[RunningSequence, ...] | None = ()

    @property
    def waiting(self) -> tuple[WaitingSequence, ...]:
        """In order of arrival."""
        if self._waiting_told is None:
            self._waiting_told = tuple(self._waiting.values())
        return self._waiting_told

    @property
    def running(self) -> tuple[RunningSequence, ...]:
        """In order of admission."""
        if self._running_told is None:
            self._running_told = tuple(self._running.values())
        return self._running_told

    def waits(self, sequence: Sequence) -> None:
        """It has come."""
        self._waiting[sequence.number] = _waiting(sequence, self._layout)
        self._waiting_told = None

    def runs(self, sequence: Sequence) -> None:
        """It has started, or rows of its prompt have run."""
        if self._waiting.pop(sequence.number, None) is not None:
            self._waiting_told = None
        self._running[sequence.number] = _running(sequence)
        self._running_told = None

    def left(self, number: int) -> None:
        """It has ended."""
        if self._waiting.pop(number, None) is not None:
            self._waiting_told = None
        elif self._running.pop(number, None) is not None:
            self._running_told = None

    def describes(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> bool:
        """Whether it equals a new description of all sequences. For audits."""
        return self.waiting == tuple(
            _waiting(sequence, self._layout) for sequence in waiting
        ) and self.running == tuple(map(_running, running))


def _waiting(sequence: Sequence, layout: KVLayout) -> WaitingSequence:
    info = sequence.info
    return WaitingSequence(
        info.sequence, sequence.settled, layout.nbytes(sequence.kv_rows), info.task, info.expected_tokens
    )


def _running(sequence: Sequence) -> RunningSequence:
    return RunningSequence(sequence.number, sequence.prefill_left, task=sequence.info.task)
