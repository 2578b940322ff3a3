"""The command line of `make bench-expertflow`: its stages, modules of their names here, and their aims."""

from __future__ import annotations

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.stages import modules_command
from greenroom.moe.openmp_waits import wait_briefly

wait_briefly()  # as greenroom's own processes do; stages import torch when they begin

STAGES = ("recall", "stall", "hits", "grouping", "cost", "engine")

AIMS = {
    "path_recall": Aim(0.72, at_least=True),
    "path_gain_points": Aim(12.0, at_least=True),
    "path_stall_share": Aim(0.3, at_least=True),
    "eight_time_ratio_reuse": Aim(1.01, at_least=False),
    "grouping_share": Aim(0.7, at_least=True),
    "bounded_bytes_ratio": Aim(0.92, at_least=False),
    "batching_time_ratio": Aim(1.02, at_least=False),
    "grouped_bytes_ratio": Aim(0.96, at_least=False),
    "speed_ratio_next_layer": Aim(1.4, at_least=True),
    "speed_ratio_default": Aim(1.0, at_least=True),
    "overhead_share": Aim(0.03, at_least=False),
    "scheduler_ms_at_64": Aim(5.0, at_least=False),
}

TEXT = """ExpertFlow and `expertflow`: what tokens foretell of a forward's routing, what that saves of waiting for
experts, which rows run together, and what all of it costs.

Prints tables, draws pictures, and prints all of it as one JSON object on its last line. What is fitted is kept in the
cache folder and made once. Without --trace the figures of recorded routing are null.
"""

EXAMPLES = """
\b
Examples:
  make bench-expertflow                             the whole; leave the machine alone meanwhile
  make bench-expertflow QUICK=1                     all of it in three minutes: to see that it works
  make bench-expertflow TRACE=gpt-oss-20b.npz       on a recorded routing with tokens too
  python -m benchmarks.expertflow --stage stall
"""

main = modules_command("benchmarks.expertflow", STAGES, AIMS, name="expertflow", text=TEXT, examples=EXAMPLES)
