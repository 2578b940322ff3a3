"""The stage `paper`: DuoServe-MoE as printed, beside its baselines (the paper's Figs 5 and 6, Table 2)."""

from benchmarks.duoserve.paper.plots import draw
from benchmarks.duoserve.paper.stage import QUICK, Scale, run
from benchmarks.duoserve.paper.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
