"""The command line of `make bench-duoserve`: its stages, modules of their names here, and their aims."""

from __future__ import annotations

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.stages import modules_command

STAGES = ("table3", "loads")

AIMS = {
    "trace_recall": Aim(0.76, at_least=True),
    "trace_recall_2": Aim(0.74, at_least=True),
    "misses_foreseen": Aim(0.28, at_least=True),
    "loads_over_bound": Aim(1.4, at_least=False),
    "prompt_loads_over_bound": Aim(1.1, at_least=False),
}

TEXT = """DuoServe-MoE and `duoserve`: what a token's path foresees, beside the paper's own predictor, and
what is loaded.

Prints tables, draws pictures, and prints all of it as one JSON object on its last line. What is fitted is kept in the
cache folder and made once.
"""

EXAMPLES = """
\b
Examples:
  make bench-duoserve                               the whole; leave the machine alone meanwhile
  make bench-duoserve QUICK=1                       all of it in two minutes: to see that it works
  make bench-duoserve TRACE=gpt-oss-20b.npz         on a recorded routing too
  python -m benchmarks.duoserve --stage table3
"""

main = modules_command("benchmarks.duoserve", STAGES, AIMS, name="duoserve", text=TEXT, examples=EXAMPLES)
