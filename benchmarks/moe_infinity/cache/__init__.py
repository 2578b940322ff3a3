"""The stage `cache`: hit rates without prefetching (MoE-Infinity, §8.4, Fig. 11)."""

from benchmarks.moe_infinity.cache.hit_rate_plots import draw
from benchmarks.moe_infinity.cache.hit_rate_tables import table
from benchmarks.moe_infinity.cache.hit_rates import QUICK, Scale, run

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
