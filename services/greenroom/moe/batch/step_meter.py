"""What steps cost on this machine, measured from those that have run."""

from __future__ import annotations

from typing import Protocol

from greenroom.policies.batching.batch_policy import StepCosts

_KEPT = 7 / 8
"""What a measurement still counts for after the next one. A first step, which is slow, is soon forgotten."""


class ExpertMoves(Protocol):
    """What moves the experts of the steps. Asked on the thread that steps."""

    @property
    def stall_seconds(self) -> float:
        """How long layers have waited for experts, in all."""
        ...

    def missing_seconds(self) -> float | None:
        """How long moving all experts that are missing now takes. None: not known yet."""
        ...


class StepMeter:
    """Measures StepCosts. Without ``moves`` no step waits for an expert and none is missing.

    Computing is a step's time without its layers' waits. A row's is a fit through the origin over the steps with
    prompts, newer ones counting for more: a step of many rows says more of a row than one of few, whose time is mostly
    not the rows'. Computing that a GPU does while its layers wait is not seen, so R* is too high there at first; a step
    of more rows than R* waits for little, and corrects it.
    """

    def __init__(self, moves: ExpertMoves | None = None) -> None:
        self._moves = moves
        self._stalled = 0.0
        self._row_seconds = 0.0  # Σ rows · computing
        self._rows_squared = 0.0
        self._decode_seconds: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._stalled = self._stall_seconds()

    def end(self, seconds: float, *, prefill_rows: int, decode_rows: int) -> None:
        """It has run as one forward, and took so long."""
        rows = prefill_rows + decode_rows
        if prefill_rows:
            computing = max(0.0, seconds - (self._stall_seconds() - self._stalled))
            self._row_seconds = _KEPT * self._row_seconds + rows * computing
            self._rows_squared = _KEPT * self._rows_squared + rows * rows
        elif decode_rows:
            before = seconds if self._decode_seconds is None else self._decode_seconds
            self._decode_seconds = _KEPT * before + (1 - _KEPT) * seconds

    def costs(self) -> StepCosts:
        return StepCosts(
            row_seconds=self._row_seconds / self._rows_squared if self._rows_squared else None,
            moving_seconds=None if self._moves is None else self._moves.missing_seconds(),
            decode_seconds=self._decode_seconds,
        )

    def _stall_seconds(self) -> float:
        return 0.0 if self._moves is None else self._moves.stall_seconds
