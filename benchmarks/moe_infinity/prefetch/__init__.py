"""The stage `prefetch`: recall and expert-ready latency (MoE-Infinity, §8.3, Figs 9 and 10)."""

from benchmarks.moe_infinity.prefetch.plots import draw
from benchmarks.moe_infinity.prefetch.recall_and_latency import QUICK, Scale, run
from benchmarks.moe_infinity.prefetch.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
