"""The command line of `make bench-duoserve`: its stages, modules of their names here, and their aims."""

from __future__ import annotations

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.stages import modules_command
from greenroom.moe.openmp_waits import wait_briefly

wait_briefly()  # as greenroom's own processes do; stages import torch when they begin

STAGES = ("table3", "loads", "engine", "paper", "serving", "cost")

AIMS = {
    "trace_recall": Aim(0.76, at_least=True),
    "trace_recall_2": Aim(0.74, at_least=True),
    "router_gain_points": Aim(6.0, at_least=True),
    "router_gain_points_2": Aim(12.0, at_least=True),
    "misses_foreseen": Aim(0.28, at_least=True),
    "loads_over_bound": Aim(1.4, at_least=False),
    "prompt_loads_over_bound": Aim(1.1, at_least=False),
    "speed_ratio_best": Aim(1.08, at_least=True),
    "speed_ratio_best_8": Aim(1.1, at_least=True),
    "prefill_bound_ratio": Aim(1.15, at_least=False),
    "predict_us_a_layer": Aim(60.0, at_least=False),
    "predict_share": Aim(0.01, at_least=False),
    "ttft_p95_ratio": Aim(0.3, at_least=False),
    "tpot_p95_ratio": Aim(1.0, at_least=False),
}

TEXT = """DuoServe-MoE and `duoserve`: what a token's path foresees, beside the paper's own predictor, what is
loaded, speed on the real engine, the paper's figures, batch policies under load, and what foreseeing costs.

Prints tables, draws pictures, and prints all of it as one JSON object on its last line. What is fitted is kept in the
cache folder and made once.
"""

EXAMPLES = """
\b
Examples:
  make bench-duoserve                               the whole; leave the machine alone meanwhile
  make bench-duoserve QUICK=1                       all of it in three minutes: to see that it works
  make bench-duoserve TRACE=gpt-oss-20b.npz         on a recorded routing too
  python -m benchmarks.duoserve --stage table3
"""

main = modules_command("benchmarks.duoserve", STAGES, AIMS, name="duoserve", text=TEXT, examples=EXAMPLES)
