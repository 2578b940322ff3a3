"""The command line of `make bench-emoe`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from benchmarks.emoe.stages import STAGES, Settings, run_stages
from benchmarks.harness.children.processes import exit_on_sigterm
from benchmarks.harness.inputs.arrivals import recorded_arrivals
from benchmarks.harness.stages import kept

EXAMPLES = """
\b
Examples:
  make bench-emoe                                   the whole, within an hour; leave the machine alone meanwhile
  make bench-emoe QUICK=1                           all of it in three minutes: to see that it works
  make bench-emoe TRACE=routing.npz                 Table 2 on a recorded routing too
  python -m benchmarks.emoe --stage memory --arm emoe-a --experts 0.6
  python -m benchmarks.emoe --stage scheduling --profile profile/profile.json --seeds 8
"""


def _known_arms(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    if names:
        from benchmarks.emoe.memory.engine_arms import KINDS  # torch comes with it

        known = list(dict.fromkeys(kind.name for kind in KINDS if kind.name != "random"))
        for name in names:
            if name not in known:
                raise click.BadParameter(f"there is no arm {name!r}; known: {', '.join(known)}")
    return names


@click.command(epilog=EXAMPLES)
@click.option("--stage", "stages", multiple=True, type=click.Choice(STAGES), help="Only these.  [default: all]")
@click.option("--quick", is_flag=True, help="Small models and few requests: to see that it works.")
@click.option(
    "--seeds", type=click.IntRange(min=2), help="Runs of everything that is random.  [default: 5 to 8; quick: 2 or 3]"
)
@click.option("--share", type=click.FloatRange(min=0.1, max=1.0), default=0.6, show_default=True,
              help="Of the experts that fit a worker, where schedulers are compared.")  # fmt: skip
@click.option("--arm", "arms", multiple=True, callback=_known_arms,
              help="Only these of the memory figures, with the random ones.  [default: all]")  # fmt: skip
@click.option("--experts", multiple=True, type=click.FloatRange(min=0.1, max=1.0),
              help="Shares of the experts for the memory figures.  [default: 0.2, 0.4, 0.6 and 0.8]")  # fmt: skip
@click.option("--profile", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Of `greenroom profile`.  [default: the bundled model's, with costs measured now]")  # fmt: skip
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A recorded routing for Table 2.")  # fmt: skip
@click.option("--arrivals", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Recorded arrivals (a CSV of the Azure traces).  [default: those in GREENROOM_DATA]")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("artifacts/bench-emoe"),
              show_default=True, help="Folder for the plots and the result (emoe.json).")  # fmt: skip
def main(
    stages: tuple[str, ...],
    quick: bool,
    seeds: int | None,
    share: float,
    arms: tuple[str, ...],
    experts: tuple[float, ...],
    profile: Path | None,
    trace: Path | None,
    arrivals: Path | None,
    out: Path,
) -> None:
    """eMoE: prediction, loading and scheduling beside what they are to be better than.

    Prints tables, writes plots, and prints all of it as one JSON object on its last line.
    """
    exit_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        quick=quick, seeds=seeds, share=share, arms=arms, experts=experts, profile=profile, trace=trace,
        arrivals=arrivals or recorded_arrivals(), out=out,
    )  # fmt: skip
    began = time.monotonic()
    result = run_stages(stages or STAGES, settings, click.echo)
    click.echo(kept(result, out / "emoe.json", quick=quick, seconds=time.monotonic() - began))
