"""The stage `serving`: what a batch policy makes of requests that come at some rate."""

from benchmarks.duoserve.serving.plots import draw
from benchmarks.duoserve.serving.stage import QUICK, Scale, run
from benchmarks.duoserve.serving.tables import table

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
