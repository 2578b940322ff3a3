"""The command line of `make bench-moe-infinity`: its stages, modules of their names here, and their aims."""

from __future__ import annotations

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.stages import modules_command

STAGES = ("cache", "prefetch", "capacity", "drift", "cost", "engine")

AIMS = {
    "oracle_gap_points": Aim(5.0, at_least=False),
    "real_gap_points": Aim(8.0, at_least=False),
    "speed_ratio_accelerate": Aim(8.0, at_least=True),
    "stall_recovered": Aim(0.5, at_least=True),
    "lookup_share": Aim(0.01, at_least=False),
}

TEXT = """MoE-Infinity and `reuse`: caching, prefetching and the engine beside what they are to be better than.

Prints tables, draws pictures, and prints all of it as one JSON object on its last line.
"""

EXAMPLES = """
\b
Examples:
  make bench-moe-infinity                           the whole, within an hour; leave the machine alone meanwhile
  make bench-moe-infinity QUICK=1                   all of it in three minutes: to see that it works
  make bench-moe-infinity TRACE=gpt-oss-20b.npz     hit rates on a recorded routing too
  python -m benchmarks.moe_infinity --stage cache --stage prefetch --seeds 5
"""

main = modules_command(
    "benchmarks.moe_infinity", STAGES, AIMS, name="moe-infinity", text=TEXT, examples=EXAMPLES,
    beside=("gain_over_best_baseline",),
)  # fmt: skip
