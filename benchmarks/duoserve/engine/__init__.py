"""The stage `engine`: `duoserve` on the real engine, experts on disk."""

from benchmarks.duoserve.engine.plots import draw
from benchmarks.duoserve.engine.scale import QUICK, Scale
from benchmarks.duoserve.engine.stage import run
from benchmarks.duoserve.engine.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
