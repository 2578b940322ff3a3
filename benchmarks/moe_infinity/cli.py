"""The command line of `make bench-moe-infinity`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import click

from benchmarks.harness.stages import kept
from benchmarks.moe_infinity.stages import STAGES, Settings, run_stages

EXAMPLES = """
\b
Examples:
  make bench-moe-infinity                           the whole, within an hour; leave the machine alone meanwhile
  make bench-moe-infinity QUICK=1                   all of it in three minutes: to see that it works
  make bench-moe-infinity TRACE=gpt-oss-20b.npz     hit rates on a recorded routing too
  python -m benchmarks.moe_infinity --stage cache --stage prefetch --seeds 5
"""


@click.command(epilog=EXAMPLES)
@click.option("--stage", "stages", multiple=True, type=click.Choice(STAGES), help="Only these.  [default: all]")
@click.option("--quick", is_flag=True, help="Small models and short traces: to see that it works.")
@click.option("--seeds", type=click.IntRange(min=2), help="Runs of what is random.  [default: as each stage has it]")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A recorded routing for the hit rates.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("artifacts/bench-moe-infinity"),
              show_default=True, help="Folder for the pictures and the result (moe-infinity.json).")  # fmt: skip
def main(stages: tuple[str, ...], quick: bool, seeds: int | None, trace: Path | None, out: Path) -> None:
    """MoE-Infinity and `reuse`: caching, prefetching and the engine beside what they are to be better than.

    Prints tables, draws pictures, and prints all of it as one JSON object on its last line.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that processes and folders go with us
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    result = run_stages(stages or STAGES, Settings(quick, out, seeds, trace), click.echo)
    click.echo(kept(result, out / "moe-infinity.json", quick=quick, seconds=time.monotonic() - began))
