"""The stage `real`: a board of real experts on the real engine, beside what the simulation foretold."""

from benchmarks.coserve.real.plots import draw
from benchmarks.coserve.real.scale import QUICK, Scale
from benchmarks.coserve.real.stage import run
from benchmarks.coserve.real.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
