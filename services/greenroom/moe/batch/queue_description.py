"""The batch policy's view of the sequences that wait and run, updated as they change."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from greenroom.moe.batch.kv_needs import KVNeeds
from greenroom.moe.batch.sequence import Sequence
from greenroom.policies.batching.batch_policy import RunningSequence, WaitingSequence


class QueueDescription:
    """A sequence is described anew when it comes, when more is known of its answer, when it starts, when rows of its
    prompt have run, when its KV has grown, and when it is preempted.

    While it waits or decodes, its description stays the same, so a step costs nothing for it.
    """

    def __init__(self, needs: KVNeeds) -> None:
        self._needs = needs
        self.kv_expected = 0
        """What those that run are expected to take at their ends beyond what they hold."""
        self._expected: dict[int, int] = {}
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

    def expected_of(self, number: int) -> int:
        """The part of ``kv_expected`` that is of this one."""
        return self._expected.get(number, 0)

    def waits(self, sequence: Sequence) -> None:
        """It has come, or it is expected to need something else."""
        self._waiting[sequence.number] = _waiting(sequence, self._needs)
        self._arrived[sequence.number] = sequence.submitted_at
        self._waiting_told = None

    def waits_again(self, sequence: Sequence) -> None:
        """It was preempted. It waits where it would by its arrival."""
        self.left(sequence.number)
        self.waits(sequence)
        self._waiting = dict(sorted(self._waiting.items()))

    def runs(self, sequence: Sequence) -> None:
        """It has started, rows of its prompt have run, or its KV has grown."""
        self._waits_no_more(sequence.number)
        self._running[sequence.number] = _running(sequence)
        self._running_told = None
        self.expects(sequence)

    def expects(self, sequence: Sequence) -> None:
        """It runs, and more is known of its answer."""
        left = self._needs.left_bytes(sequence)
        self.kv_expected += left - self._expected.get(sequence.number, 0)
        self._expected[sequence.number] = left

    def left(self, number: int) -> None:
        """It has ended."""
        if not self._waits_no_more(number) and self._running.pop(number, None) is not None:
            self._running_told = None
            self.kv_expected -= self._expected.pop(number)

    def _waits_no_more(self, number: int) -> bool:
        """Whether it has waited until now."""
        if self._waiting.pop(number, None) is None:
            return False
        del self._arrived[number]
        self._waiting_told = None
        return True

    def describes(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> bool:
        """Whether it equals a new description of all sequences. For audits."""
        running = tuple(running)
        return (
            self.waiting == tuple(_waiting(sequence, self._needs) for sequence in waiting)
            and self.running == tuple(map(_running, running))
            and self._expected == {sequence.number: self._needs.left_bytes(sequence) for sequence in running}
            and self.kv_expected == sum(self._expected.values())
        )


def _waiting(sequence: Sequence, needs: KVNeeds) -> WaitingSequence:
    info = sequence.info
    request = sequence.request
    return WaitingSequence(
        info.sequence,
        sequence.settled,
        needs.expected_bytes(sequence),
        info.task,
        info.expected_tokens,
        slo_ttft_ms=None if sequence.generated else request.slo.ttft_ms,
    )


def _running(sequence: Sequence) -> RunningSequence:
    kv = sequence.kv
    if kv is None:
        raise ValueError(f"sequence {sequence.number} runs without KV")
    prefill_left = sequence.prefill_left
    return RunningSequence(
        sequence.number,
        prefill_left,
        task=sequence.info.task,
        kv_held=kv.nbytes,
        loss=kv.length if prefill_left else kv.capacity,
        preempted=sequence.preempted,
    )
