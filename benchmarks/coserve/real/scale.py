"""How much the stage `real` runs, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.coserve.boards import RESIDENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``types``: of board A; None: all. ``requests``: of the burst. ``resident``: the memory, of the experts' bytes.

    At most ``rounds`` rounds, and none that would end after ``seconds``. ``line_s``: the line, for each system.
    ``line_share``: its rate, of what `pull` served of the burst. ``seed``: of the board and of what is drawn.
    ``sample``: requests that executors and memory are chosen with. ``measured``: costs are those of this machine, else
    round figures.
    """

    types: int | None = None
    requests: int = 1000
    resident: float = RESIDENT
    rounds: int = 3
    seconds: float = 420.0
    line_s: float = 60.0
    line_share: float = 0.7
    seed: int = 0
    sample: int = 1500
    measured: bool = True


QUICK = Scale(types=24, requests=150, resident=0.25, rounds=1, seconds=20.0, line_s=4.0, sample=200, measured=False)
"""All of it, with few experts: to see that it works."""
