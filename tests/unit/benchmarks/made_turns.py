"""Turns and rows for the benchmarks' tests, with only what a test cares about."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.rows import Row
from benchmarks.harness.turn import Trace, Turn


def turn(seconds: float, *, tokens: int = 10, **values: Any) -> Turn:
    return Turn(**{"seconds": seconds, "tokens": tokens, "ids": [[1] * tokens], **values})


def row(stage: str, model: str, system: str, seconds: list[float], **values: Any) -> Row:
    """A row whose rounds took ``seconds``; ``each`` are further values of every turn."""
    each = values.pop("each", {})
    turns = {number: turn(taken, **each) for number, taken in enumerate(seconds, start=1)}
    return Row(stage, model, system, **{"turns": turns, **values})


def trace(*, belady: int = 0, touched: int = 0) -> Trace:
    return Trace(accesses=0, belady_bytes=belady, bytes_touched=touched)
