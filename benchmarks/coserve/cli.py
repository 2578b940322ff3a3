"""The command line of `make bench-coserve`: its stages, modules of their names here, and their aims."""

from __future__ import annotations

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.stages import modules_command
from greenroom.moe.openmp_waits import wait_briefly

wait_briefly()  # as greenroom's own processes do; stages import torch when they begin

STAGES = ("burst", "line", "executors", "overhead", "real")

AIMS = {
    "coserve_over_samba": Aim(4.0, at_least=True),
    "pull_over_samba": Aim(5.0, at_least=True),
    "pull_over_samba_torch": Aim(6.0, at_least=True),
    "pull_over_coserve": Aim(1.2, at_least=True),
    "pull_over_simple": Aim(0.97, at_least=True),
    "pull_switches_ratio": Aim(0.4, at_least=False),
    "bound_share": Aim(0.75, at_least=True),
    "line_rate_over_coserve": Aim(1.4, at_least=True),
    "line_p99_over_simple": Aim(0.7, at_least=False),
    "window_share": Aim(0.95, at_least=True),
    "overhead_share": Aim(0.03, at_least=False),
    "replay_error": Aim(0.15, at_least=False),
}

TEXT = """CoServe and `pull`: boards of hundreds of whole experts under a tenth of their memory, beside the paper's
baselines and simple systems: throughput, switches, a line that never stops, executors and memory, what deciding costs.

Prints tables, draws pictures, and prints all of it as one JSON object on its last line. What experts cost is measured
once and kept in the cache folder. All but the stage `real` is replayed on a virtual clock.
"""

EXAMPLES = """
\b
Examples:
  make bench-coserve                               the whole; leave the machine alone meanwhile
  make bench-coserve QUICK=1                       all of it in three minutes: to see that it works
  python -m benchmarks.coserve --stage burst
"""

main = modules_command("benchmarks.coserve", STAGES, AIMS, name="coserve", text=TEXT, examples=EXAMPLES)
