"""The real engine beside accelerate and beside other policies (Figs 4 to 8, section 8.6, and what look-ups cost)."""

from benchmarks.moe_infinity.engine.effort import QUICK, Scale
from benchmarks.moe_infinity.engine.plots import draw
from benchmarks.moe_infinity.engine.stage import run
from benchmarks.moe_infinity.engine.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
