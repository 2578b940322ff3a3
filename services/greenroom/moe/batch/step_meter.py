"""What steps cost on this machine, measured from those that have run."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from greenroom.policies.base.array_types import Mask
from greenroom.policies.batching.batch_policy import StepCosts

_KEPT = 7 / 8
"""What a measurement still counts for after the next one. A first step, which is slow, is soon forgotten."""


_APART = 2.0
"""So many times the rows of steps without prompts tell what rows cost from what a step costs."""


class ExpertMoves(Protocol):
    """What moves the experts of the steps. Asked on the thread that steps."""

    @property
    def stall_seconds(self) -> float:
        """How long layers have waited for experts, in all."""
        ...

    def missing_seconds(self) -> float | None:
        """How long moving all experts that are missing now takes. None: not known yet."""
        ...

    def resident(self) -> Mask:
        """``[N]``: the experts that are on the device now. The same array may be returned again."""
        ...


class StepMeter:
    """Measures StepCosts. Without ``moves`` no step waits for an expert and none is missing.

    Computing is a step's time without its layers' waits. The line through the mean step with prompts and the mean step
    without gives what a row costs, and what a step costs whatever its rows. Until both are known, or where they do not
    tell the two apart, all of it is the rows'. Computing that a GPU does while its layers wait is not seen, so R* is
    too high there at first; a step of more rows than R* waits for little, and corrects it.
    """

    def __init__(self, moves: ExpertMoves | None = None) -> None:
        self._moves = moves
        self._stalled = 0.0
        self._prompts: _Mean | None = None
        self._decoding: _Mean | None = None
        self._decode_seconds: float | None = None

    def begin(self) -> None:
        """A step begins."""
        self._stalled = self._stall_seconds()

    def end(self, seconds: float, *, prefill_rows: int, decode_rows: int) -> None:
        """It has run as one forward, and took so long."""
        step = _Mean(prefill_rows + decode_rows, max(0.0, seconds - (self._stall_seconds() - self._stalled)))
        if prefill_rows:
            self._prompts = step.after(self._prompts)
        elif decode_rows:
            self._decoding = step.after(self._decoding)
            before = seconds if self._decode_seconds is None else self._decode_seconds
            self._decode_seconds = _KEPT * before + (1 - _KEPT) * seconds

    def costs(self) -> StepCosts:
        row_seconds, fixed_seconds = self._computing()
        return StepCosts(
            row_seconds=row_seconds,
            moving_seconds=None if self._moves is None else self._moves.missing_seconds(),
            decode_seconds=self._decode_seconds,
            fixed_seconds=fixed_seconds,
        )

    def _computing(self) -> tuple[float | None, float]:
        """Of a row, and of a step whatever its rows."""
        many, few = self._prompts, self._decoding
        if many is None:
            return None, 0.0
        if few is not None and many.rows > _APART * few.rows:
            row = (many.computing - few.computing) / (many.rows - few.rows)
            fixed = few.computing - row * few.rows
            if row > 0 and fixed > 0:
                return row, fixed
        return many.computing / many.rows, 0.0

    def _stall_seconds(self) -> float:
        return 0.0 if self._moves is None else self._moves.stall_seconds


class _Mean(NamedTuple):
    """Of steps, newer ones counting for more."""

    rows: float
    computing: float

    def after(self, before: _Mean | None) -> _Mean:
        if before is None:
            return self
        return _Mean(*(_KEPT * old + (1 - _KEPT) * new for old, new in zip(before, self, strict=True)))
