"""The stage `grouping`: rows that run together because their paths share experts (ExpertFlow, Table 3)."""

from benchmarks.expertflow.grouping.report import draw, table
from benchmarks.expertflow.grouping.stage import QUICK, Scale, run

__all__ = ["QUICK", "Scale", "draw", "run", "table"]
