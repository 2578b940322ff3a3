"""The stage `recall`: what is foretold of a token's picks, and of a batch's experts (ExpertFlow, Table 1)."""

from benchmarks.expertflow.recall.report import draw, table
from benchmarks.expertflow.recall.stage import QUICK, Scale, run

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
