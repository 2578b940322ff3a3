"""Teacher forcing: how probable given answers are to a model, token by token, without generating any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.errors import InvalidRequest
from greenroom.moe.attention.kv_cache import SequenceKV
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.sequence_observer import SequenceObserver
from greenroom.policies.base.events import UNKNOWN_TASK, SequenceEnd, SequenceInfo

MOST_LOGIT_ROWS = 128
"""The most rows of a forward whose logits are kept: each is as wide as the vocabulary."""

_numbers = itertools.count(1 << 40)  # as sequences, beyond whatever a batch engine counts to


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt and the answer that it is given."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    task: str = UNKNOWN_TASK


@dataclass(frozen=True, slots=True, eq=False)
class Forced:
    """By token of the answer: its natural log-probability given all tokens before it, and whether it is the most
    probable one there. ``approximated``: the sequence's share of approximated rows, by the observer.
    """

    log_probabilities: NDArray[np.float64]
    agreed: NDArray[np.bool_]
    approximated: float = 0.0


def perplexity(forced: Sequence[Forced]) -> float:
    """Over all tokens of all answers."""
    return float(np.exp(-np.mean(np.concatenate([one.log_probabilities for one in forced]))))


def force(
    engine: BatchEngine,
    given: Sequence[Given],
    *,
    observer: SequenceObserver | None = None,
    begun: Callable[[int, int], None] | None = None,
    done: Callable[[], object] | None = None,
) -> list[Forced]:
    """Run the prompts with their answers through the model, as many together as a step of the engine holds.

    On the thread that owns the engine, while nothing runs. ``observer`` is told of them as of any sequence (an expert
    engine, whose policy would know their tasks), ``begun`` of each place's sequence number before its first rows,
    ``done`` of each that is finished. Raises InvalidRequest for one that the engine's KV does not hold; whatever a
    forward raises comes through.
    """
    results: list[Forced | None] = [None] * len(given)
    left = list(range(len(given)))[::-1]
    running: list[_Forcing] = []
    try:
        while left or running:
            while left and len(running) < engine.config.max_running:
                one = given[left[-1]]
                rows = len(one.prompt_ids) + len(one.answer_ids) - 1
                if not engine.kv.can_reserve(rows):
                    if running:
                        break
                    raise InvalidRequest(f"an answer of {rows} tokens with its prompt does not fit the KV memory")
                joined = _Forcing(left.pop(), next(_numbers), one, engine.kv.reserve(rows))
                running.append(joined)
                if begun is not None:
                    begun(joined.place, joined.number)
                if observer is not None:
                    info = SequenceInfo(joined.number, one.task, len(one.prompt_ids), len(one.answer_ids))
                    observer.sequence_queued(info)
                    observer.sequence_started(info)
            _forward(engine, running)
            for ended in [forcing for forcing in running if not forcing.left]:
                running.remove(ended)
                results[ended.place] = ended.result(_leave(engine, ended, observer, SequenceEnd.FINISHED))
                if done is not None:
                    done()
    finally:
        for cut in running:
            _leave(engine, cut, observer, SequenceEnd.FAILED)
    return [result for result in results if result is not None]


@dataclass(slots=True, eq=False)
class _Forcing:
    """One of them, on its way through the model."""

    place: int
    number: int
    given: Given
    kv: SequenceKV
    log_probabilities: list[float] = field(default_factory=list)
    agreed: list[bool] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """All its tokens but the last, which nothing follows."""
        return len(self.given.prompt_ids) + len(self.given.answer_ids) - 1

    @property
    def left(self) -> int:
        return self.rows - self.kv.length

    def chunk(self, most_rows: int, most_logits: int) -> Chunk | None:
        """Its next rows; None where there is no place for one."""
        start = self.kv.length
        first = len(self.given.prompt_ids) - 1  # the row that the answer's first token follows
        stop = min(start + min(most_rows, self.left), max(start, first) + most_logits)
        if stop <= start:
            return None
        tokens = [*self.given.prompt_ids, *self.given.answer_ids][start:stop]
        logits = max(0, stop - max(start, first))
        return Chunk(self.number, tokens, self.kv, prefill=True, wants_logits=logits > 0, logit_rows=max(1, logits))

    def take(self, logits: torch.Tensor) -> None:
        done = len(self.log_probabilities)
        tokens = torch.tensor(list(self.given.answer_ids[done : done + len(logits)]), device=logits.device)
        numbers = logits.float()
        chosen = numbers.gather(1, tokens[:, None])[:, 0] - numbers.logsumexp(dim=1)
        self.log_probabilities += chosen.tolist()
        self.agreed += (numbers.argmax(dim=1) == tokens).tolist()

    def result(self, approximated: float) -> Forced:
        scores = np.array(self.log_probabilities, dtype=np.float64)
        return Forced(scores, np.array(self.agreed, dtype=np.bool_), approximated)


def _forward(engine: BatchEngine, running: Sequence[_Forcing]) -> None:
    rows, logits = engine.config.tokens_per_step, MOST_LOGIT_ROWS
    parts: list[tuple[_Forcing, Chunk]] = []
    for one in running:
        chunk = one.chunk(rows, logits)
        if chunk is not None:
            parts.append((one, chunk))
            rows -= len(chunk.tokens)
            logits -= chunk.logit_rows if chunk.wants_logits else 0
    out = engine.model.forward([chunk for _, chunk in parts])
    for one, chunk in parts:
        chunk.kv.commit(len(chunk.tokens))
        if chunk.wants_logits:
            one.take(out[: chunk.logit_rows])
            out = out[chunk.logit_rows :]


def _leave(engine: BatchEngine, one: _Forcing, observer: SequenceObserver | None, end: SequenceEnd) -> float:
    """Returns what the observer says was approximated of it."""
    rows = one.kv.length
    engine.kv.release(one.kv)
    if observer is None:
        return 0.0
    approximated = observer.approximated(one.number, rows)
    observer.sequence_ended(one.number, end)
    return approximated
