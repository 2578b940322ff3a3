"""How long a step takes by its rows, from measured points: shared by profiles, placement policies and simulators.

A step of d rows that decode and p rows of prompts reads an expert once, whichever rows want it. So it takes less than
both: the prompts' own time, and a measured share of what the d rows would take alone. Between measured numbers of rows
it is a straight line of the whole step's time, so that a bend stays where it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]


class StepCosts:
    """Milliseconds of a step. Never less with more rows: what else ran only adds time, so a size that took longer than
    a larger one counts as fast as that one.

    ``decode_ms``: of steps that only decode, by their rows. Beyond the largest they go on in proportion.
    ``prompt_ms``: of steps that only read prompts, by their rows. Beyond the largest they go on along the line from one
    of at most half its rows, since between neighbours the line may be noise; with ``onward`` by so many a row.
    Neither is empty. ``beside``: the share of a decode step's time by which its rows make a step with prompts longer;
    None, where that was not measured: they count as rows of prompts.
    """

    def __init__(
        self,
        decode_ms: Mapping[int, float],
        prompt_ms: Mapping[int, float],
        beside: float | None = None,
        *,
        onward: float | None = None,
    ) -> None:
        self._beside = beside
        self._decode_at, self._decode_ms = _rising(decode_ms)
        self._prompt_at, self._prompt_ms = _rising(prompt_ms)
        self._onward = _slope(self._prompt_at, self._prompt_ms) if onward is None else onward

    def step_ms(self, decode_rows: int, prompt_rows: int = 0) -> float:
        """Of a step with so many rows of each kind, at least one in all. Raises ValueError for other numbers."""
        if decode_rows < 0 or prompt_rows < 0 or not decode_rows + prompt_rows:
            raise ValueError(f"a step has rows, not {decode_rows} that decode and {prompt_rows} of prompts")
        alone = self._decoding(decode_rows)
        return max(alone, float(self._both(decode_rows, np.float64(prompt_rows)))) if prompt_rows else alone

    def token_ms(self, rows: int) -> float:
        """eMoE's c at a batch of ``rows``: a row's share of a step that decodes so many."""
        return self.step_ms(rows) / rows

    def reading_ms(self, tokens: Figures, decode_rows: int) -> Figures:
        """What steps take longer in which so many tokens of prompts are read, while ``decode_rows`` decode. More than
        the largest measured step take as many such steps."""
        alone = self._decoding(decode_rows)
        most = self._prompt_at[-1]
        steps = np.maximum(1.0, tokens / most)
        longer: Figures = steps * np.maximum(0.0, self._both(decode_rows, tokens / steps) - alone)
        return np.where(tokens > 0, longer, 0.0)

    def _both(self, decode_rows: int, prompt_rows: Figures | np.float64) -> Figures:
        if self._beside is None:
            return self._prompts(decode_rows + prompt_rows)
        return self._prompts(prompt_rows) + self._beside * self._decoding(decode_rows)

    def _decoding(self, rows: int) -> float:
        if not rows:
            return 0.0
        most = self._decode_at[-1]
        return float(np.interp(rows, self._decode_at, self._decode_ms)) * max(1.0, rows / float(most))

    def _prompts(self, rows: Figures | np.float64) -> Figures:
        beyond = np.maximum(0.0, rows - self._prompt_at[-1])
        found: Figures = np.interp(rows, self._prompt_at, self._prompt_ms) + beyond * self._onward
        return found


def _slope(at: Figures, ms: Figures) -> float:
    """Milliseconds a row beyond the last point: never 0."""
    before = int(np.searchsorted(at, at[-1] / 2, side="right")) - 1
    rows, longer = (at[-1] - at[before], ms[-1] - ms[before]) if before >= 0 else (at[-1], ms[-1])
    return float(longer / rows) if longer > 0 else float(ms[-1] / at[-1])


def _rising(points: Mapping[int, float]) -> tuple[Figures, Figures]:
    """The points in order, each no higher than those behind it."""
    ordered = sorted(points.items())
    lowest = list(accumulate((ms for _, ms in reversed(ordered)), min))[::-1]
    return np.array([rows for rows, _ in ordered], dtype=np.float64), np.array(lowest, dtype=np.float64)
