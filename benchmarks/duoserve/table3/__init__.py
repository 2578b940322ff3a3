"""The stage `table3`: what a token's path foresees of its picks (DuoServe-MoE, Table 3)."""

from benchmarks.duoserve.table3.plots import draw
from benchmarks.duoserve.table3.stage import QUICK, Scale, run
from benchmarks.duoserve.table3.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
