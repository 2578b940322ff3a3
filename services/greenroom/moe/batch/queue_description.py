"""The batch policy's view of the sequences that wait and run, updated as they change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

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
        self._arrived: dict[int, float] = {}  # those of _waiting, in seconds of the loop's clock
        self._running: dict[int, RunningSequence] = {}
        self._waiting_told: tuple[WaitingSequence, ...] | None = ()
        self._running_told: tuple[RunningSequence, ...] | None = ()

    @property
    def waiting(self) -> tuple[WaitingSequence, ...]:
        """In order of arrival, without their waits."""
        if self._waiting_told is None:
            self._waiting_told = tuple(self._waiting.values())
        return self._waiting_told

    def waiting_at(self, now: float, most: int) -> tuple[WaitingSequence, ...]:
        """As ``waiting``, the first ``most`` with their waits until ``now``. It costs by ``most``."""
        waited = tuple(
            replace(described, waited_ms=max(0.0, 1000.0 * (now - self._arrived[number])))
            for number, described in itertools.islice(self._waiting.items(), most)
        )
        return waited + self.waiting[len(waited) :]

    @property
    def running(self) -> tuple[RunningSequence, ...]:
        """In order of admission."""
        if self._running_told is None:
            self._running_told = tuple(self._running.values())
        return self._running_told

    def waits(self, sequence: Sequence) -> None:
        """It has come."""
        self._waiting[sequence.number] = _waiting(sequence, self._layout)
        self._arrived[sequence.number] = sequence.submitted_at
        self._waiting_told = None

    def runs(self, sequence: Sequence) -> None:
        """It has started, or rows of its prompt have run."""
        self._waits_no_more(sequence.number)
        self._running[sequence.number] = _running(sequence)
        self._running_told = None

    def left(self, number: int) -> None:
        """It has ended."""
        if not self._waits_no_more(number) and self._running.pop(number, None) is not None:
            self._running_told = None

    def _waits_no_more(self, number: int) -> bool:
        """Whether it has waited until now."""
        if self._waiting.pop(number, None) is None:
            return False
        del self._arrived[number]
        self._waiting_told = None
        return True

    def describes(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> bool:
        """Whether it equals a new description of all sequences. For audits."""
        return self.waiting == tuple(
            _waiting(sequence, self._layout) for sequence in waiting
        ) and self.running == tuple(map(_running, running))


def _waiting(sequence: Sequence, layout: KVLayout) -> WaitingSequence:
    info = sequence.info
    request = sequence.request
    return WaitingSequence(
        info.sequence,
        sequence.settled,
        layout.nbytes(sequence.kv_rows),
        info.task,
        info.expected_tokens,
        slo_ttft_ms=None if request.prefix else request.slo.ttft_ms,
    )


def _running(sequence: Sequence) -> RunningSequence:
    return RunningSequence(sequence.number, sequence.prefill_left, task=sequence.info.task)
