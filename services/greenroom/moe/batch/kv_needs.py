"""How much KV memory a sequence takes when it starts, and how much it is expected to take at its end."""

from __future__ import annotations

from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.batch.sequence import Sequence
from greenroom.policies.base.answer_lengths import AnswerLengths
from greenroom.policies.batching.preemption import MOST_PREEMPTIONS


class KVNeeds:
    """By the mean answers of task types, ``lengths``. A sequence that may not be preempted again, and any on a device
    whose reservations do not grow, takes all that it may ever need at its start.
    """

    def __init__(self, kv: KVStore, lengths: AnswerLengths) -> None:
        self._kv = kv
        self.lengths = lengths

    def answer_tokens(self, sequence: Sequence) -> int:
        """How long its answer is expected to be, by what is known now and what it has already."""
        task, prompt = sequence.info.task, sequence.prompt_tokens
        return self.lengths.held_tokens(task, prompt, sequence.limit, sequence.generated)

    def first_rows(self, sequence: Sequence) -> int:
        """The rows that it reserves when it starts."""
        if sequence.preempted >= MOST_PREEMPTIONS:
            return sequence.kv_rows
        return self._kv.first_rows(sequence.settled, sequence.kv_rows)

    def expected_bytes(self, sequence: Sequence) -> int:
        """What it is expected to hold at its end, if its answer has ``Sequence.expected_answer`` tokens."""
        rows = min(sequence.kv_rows, sequence.prompt_tokens + sequence.expected_answer - 1)
        return self._kv.layout.nbytes(max(rows, self.first_rows(sequence)))

    def left_bytes(self, sequence: Sequence) -> int:
        """What it is expected to take before its end, beyond what it holds."""
        held = 0 if sequence.kv is None else sequence.kv.nbytes
        return max(0, self.expected_bytes(sequence) - held)
