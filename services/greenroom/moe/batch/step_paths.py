"""The routing paths of a step's rows, each foretold once and kept until its row has run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from greenroom.moe.batch.batch_stats import BatchStats
from greenroom.moe.batch.sequence import Sequence
from greenroom.policies.base.array_types import Scores
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import SequencePaths

log = logging.getLogger(__name__)

_MOST_FAILURES = 3
"""In a row; after these nothing is asked until another version is swapped in."""


class Part(NamedTuple):
    """Consecutive rows of a sequence, ``ahead`` rows behind those that have run."""

    sequence: Sequence
    tokens: int
    ahead: int = 0

    @property
    def start(self) -> int:
        return self.ahead + (self.sequence.kv.length if self.sequence.kv else 0)


class StepPaths:
    """Asks ``source`` for rows whose tokens are known (None: nothing foretells paths, and there are none).

    A source that fails costs predictions, never a token: the rows have no paths then. Failures are logged and counted
    in ``stats``, as is the time that the source takes. A source that failed in a step is asked again in the next one. A
    sequence is begun with it when it is first asked for.
    """

    def __init__(self, source: TokenPaths | None, stats: BatchStats, clock: Callable[[], float]) -> None:
        self._source = source
        self._stats = stats
        self._clock = clock
        self._failures = 0
        self._failed_now = False
        self._begun: set[int] = set()
        self._told: dict[int, tuple[int, Scores]] = {}  # by sequence: from which position on
        self._last: tuple[list[tuple[int, int, int]], Scores] | None = None

    def swap(self, source: TokenPaths | None) -> None:
        """Ask this one from now on. It begins running sequences with what has been said in them."""
        self._source = source
        self._failures = 0
        self._begun.clear()
        self._told.clear()
        self._last = None

    def begin_step(self) -> None:
        """Another step is about to be planned."""
        self._failed_now = False

    def decoding(self, running: Iterable[Sequence]) -> SequencePaths | None:
        """Of the next row of each of these that decodes."""
        if self._source is None:
            return None
        parts = [Part(sequence, 1) for sequence in running if not sequence.prefill_left]
        chances = self.rows(parts)
        if chances is None:
            return None
        return SequencePaths(np.array([part.sequence.number for part in parts], dtype=np.int64), chances)

    def rows(self, parts: Items[Part]) -> Scores | None:
        """``[T, N]``: the paths of these rows, in this order. None: they are not known."""
        if self._source is None or not parts:
            return None
        keys = [_key(part) for part in parts]
        missing = [part for part, key in zip(parts, keys, strict=True) if not self._knows(*key)]
        if missing and (self._failed_now or not self._ask(self._source, missing)):
            return None
        if self._last is not None and self._last[0] == keys:
            return self._last[1]
        return np.concatenate([self._told[part.sequence.number][1] for part in parts])

    def end(self, number: int) -> None:
        """The sequence has ended."""
        self._told.pop(number, None)
        if number in self._begun and self._source is not None:
            self._begun.discard(number)
            try:
                self._source.end(number)
            except Exception:
                self._failed()

    def _knows(self, number: int, start: int, tokens: int) -> bool:
        told = self._told.get(number)
        return told is not None and told[0] == start and len(told[1]) == tokens

    def _ask(self, source: TokenPaths, parts: Items[Part]) -> bool:
        """Have these foretold. False: it failed."""
        began = self._clock()
        try:
            chances = self._foretold(source, parts)
        except Exception:
            self._failed()
            return False
        finally:
            self._stats.paths_seconds += self._clock() - began
        self._failures = 0
        self._last = [_key(part) for part in parts], chances
        row = 0
        for part in parts:
            self._told[part.sequence.number] = part.start, chances[row : row + part.tokens]
            row += part.tokens
        return True

    def _foretold(self, source: TokenPaths, parts: Items[Part]) -> Scores:
        """Raises what the source raises, and ValueError for an answer of another form."""
        for sequence, start in ((part.sequence, part.start) for part in parts):
            if sequence.number not in self._begun:
                source.begin(sequence.number, np.array(sequence.tokens[: max(start, sequence.settled)], dtype=np.int64))
                self._begun.add(sequence.number)
        lengths = [part.tokens for part in parts]
        sequences = np.repeat(np.array([part.sequence.number for part in parts], dtype=np.int64), lengths)
        positions = np.concatenate([np.arange(part.start, part.start + part.tokens) for part in parts])
        tokens = [token for part in parts for token in part.sequence.tokens[part.start : part.start + part.tokens]]
        chances = source.chances(sequences, positions, np.array(tokens, dtype=np.int64))
        if chances.ndim != 2 or len(chances) != len(sequences):
            raise ValueError(f"paths of shape {chances.shape} for {len(sequences)} rows")
        if chances.size and not (chances.min() >= 0 and chances.max() <= 1):
            return np.clip(np.nan_to_num(chances, nan=0.0), 0, 1)
        return chances

    def _failed(self) -> None:
        self._stats.path_failures += 1
        self._failures += 1
        self._failed_now = True
        self._last = None
        log.exception("foretelling routing paths failed")
        if self._failures >= _MOST_FAILURES:
            log.error("routing paths are not foretold any more, until another version comes")
            self._source = None


def _key(part: Part) -> tuple[int, int, int]:
    return part.sequence.number, part.start, part.tokens
