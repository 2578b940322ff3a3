"""The routing paths of a step's rows, each foretold once and kept until its row has run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.moe.batch.batch_stats import BatchStats
from greenroom.moe.batch.sequence import Sequence
from greenroom.policies.base.array_types import Scores
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import SequencePaths

log = logging.getLogger(__name__)

_MOST_FAILURES = 3
"""Steps in a row that had some; after these nothing is asked until another version is swapped in."""


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
    sequence is begun with it when it is first asked for; one that can not be begun is foretold nothing, and harms no
    other. All answers of a source have as many columns as its first.
    """

    def __init__(self, source: TokenPaths | None, stats: BatchStats, clock: Callable[[], float]) -> None:
        self._source = source
        self._stats = stats
        self._clock = clock
        self._failures = 0
        self._failed_now = False
        self._begun: set[int] = set()
        self._refused: set[int] = set()  # those that could not be begun
        self._width: int | None = None
        self._told: dict[int, tuple[int, Scores]] = {}  # by sequence: from which position on
        self._last: tuple[list[tuple[int, int, int]], Scores] | None = None

    def swap(self, source: TokenPaths | None) -> None:
        """Ask this one from now on. It begins running sequences with what has been said in them."""
        self._source = source
        self._failures = 0
        self._width = None
        self._begun.clear()
        self._refused.clear()
        self._told.clear()
        self._last = None

    def begin_step(self) -> None:
        """Another step is about to be planned."""
        if not self._failed_now:
            self._failures = 0
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

    def ran(self, parts: Items[Part], picks: NDArray[np.integer]) -> None:
        """The rows of these have run, and are not committed yet: ``picks[T, layers, k]`` (TokenPaths.picked)."""
        if self._source is None or not parts:
            return
        asked = np.array([part.sequence.number in self._begun for part in parts])
        of_part = np.repeat(np.arange(len(parts)), [part.tokens for part in parts])
        rows = asked[of_part]
        began = self._clock()
        try:
            self._source.picked(
                np.array([part.sequence.number for part in parts], dtype=np.int64)[of_part][rows],
                np.concatenate([np.arange(part.start, part.start + part.tokens) for part in parts])[rows],
                picks[rows],
            )
        except Exception:
            self._failed()
        finally:
            self._stats.paths_seconds += self._clock() - began

    def end(self, number: int) -> None:
        """The sequence has ended."""
        self._told.pop(number, None)
        self._refused.discard(number)
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
        self._last = [_key(part) for part in parts], chances
        row = 0
        for part in parts:
            self._told[part.sequence.number] = part.start, chances[row : row + part.tokens]
            row += part.tokens
        return True

    def _foretold(self, source: TokenPaths, parts: Items[Part]) -> Scores:
        """Raises what the source raises, and ValueError for an answer of another form."""
        for part in parts:
            self._begin(source, part)
        lengths = [part.tokens for part in parts]
        served = np.repeat([part.sequence.number in self._begun for part in parts], lengths)
        sequences = np.repeat(np.array([part.sequence.number for part in parts], dtype=np.int64), lengths)
        positions = np.concatenate([np.arange(part.start, part.start + part.tokens) for part in parts])
        tokens = [token for part in parts for token in part.sequence.tokens[part.start : part.start + part.tokens]]
        chances = source.chances(sequences[served], positions[served], np.array(tokens, dtype=np.int64)[served])
        if chances.ndim != 2 or len(chances) != np.count_nonzero(served):
            raise ValueError(f"paths of shape {chances.shape} for {np.count_nonzero(served)} rows")
        if self._width not in (None, chances.shape[1]):
            raise ValueError(f"paths of {chances.shape[1]} experts, where they had {self._width} before")
        self._width = chances.shape[1]
        if not served.all():
            some, chances = chances, np.zeros((len(served), chances.shape[1]), dtype=np.float32)
            chances[served] = some
        if chances.size and not (chances.min() >= 0 and chances.max() <= 1):
            return np.clip(np.nan_to_num(chances, nan=0.0), 0, 1)
        return chances

    def _begin(self, source: TokenPaths, part: Part) -> None:
        sequence = part.sequence
        if sequence.number in self._begun or sequence.number in self._refused:
            return
        known = sequence.tokens[: max(part.start, sequence.settled)]
        try:
            source.begin(sequence.number, np.array(known, dtype=np.int64))
        except Exception:
            self._refused.add(sequence.number)
            self._stats.path_failures += 1
            log.exception("request %s is foretold nothing", sequence.request.request_id)
        else:
            self._begun.add(sequence.number)

    def _failed(self) -> None:
        self._stats.path_failures += 1
        if not self._failed_now:
            self._failures += 1
        self._failed_now = True
        self._last = None
        log.exception("foretelling routing paths failed")
        if self._failures >= _MOST_FAILURES:
            log.error("routing paths are not foretold any more, until another version comes")
            self._source = None


def _key(part: Part) -> tuple[int, int, int]:
    return part.sequence.number, part.start, part.tokens
