"""The command line of `make bench-engine`."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import click

from benchmarks.engine import plan, speed_plot, tables
from benchmarks.engine.figures import figures, row_json
from benchmarks.engine.run import Bench
from benchmarks.harness.children import cgroups
from benchmarks.harness.children.greenroom_child import parse_policy
from benchmarks.harness.children.processes import Children, exit_on_sigterm
from benchmarks.harness.inputs.prepared_models import ALL_MODELS, MODELS
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.results import write_result
from greenroom.core.errors import InvalidConfig
from greenroom.policies.registry import EXPERT_POLICIES, GRAPH_POLICIES

EXAMPLES = """
\b
Examples:
  make bench-engine                                   the whole, under half an hour; leave the machine alone meanwhile
  python -m benchmarks.engine --quick                 a smoke run of about a minute, on small copies of the models
  python -m benchmarks.engine --model widened --policy lfu --policy look-ahead:layers=3 --rounds 5
  python -m benchmarks.engine --device cuda --model large    on a GPU: 13.5 GiB of experts, 27 GiB of disk
"""


@click.command(epilog=EXAMPLES)
@click.option("--rounds", type=click.IntRange(min=1), help="Measured rounds at most, after one that warms up.")
@click.option("--minutes", type=click.FloatRange(min=0), help="No new round once its stage's share of this is over.")
@click.option("--quick", is_flag=True, help="Small models, one round: to see that it works, not how fast.")
@click.option("--model", "models", multiple=True, type=click.Choice(ALL_MODELS),
              help=f"Only these.  [default: {', '.join(MODELS)}]")  # fmt: skip
@click.option("--policy", "policies", multiple=True, metavar="NAME[:OPTION=VALUE,...]",
              help=f"Only these of {', '.join(sorted(EXPERT_POLICIES))}.  [default: all]")  # fmt: skip
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="What every arm computes on.  [default: cpu]")
@click.option("--cgroups/--no-cgroups", "in_groups", default=True, help="Bound arms by memory cgroups where possible.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("artifacts/bench-engine"),
              show_default=True, help="Folder for the plot (engine.png) and the result (engine.json).")  # fmt: skip
def main(
    rounds: int | None,
    minutes: float | None,
    quick: bool,
    models: tuple[str, ...],
    policies: tuple[str, ...],
    device: str | None,
    in_groups: bool,
    out: Path,
) -> None:
    """The engine beside transformers and accelerate, and beside what the link physically allows.

    Prints a table, writes a plot, and prints all of it as one JSON object on its last line.
    """
    exit_on_sigterm()
    given: dict[str, Any] = {"rounds": rounds, "minutes": minutes, "device": device}
    scale = dataclasses.replace(
        plan.QUICK if quick else plan.Scale(), **{name: value for name, value in given.items() if value is not None}
    )
    names = policies or (
        ("lfu", "lru")
        if quick
        else (*(name for name in sorted(EXPERT_POLICIES) if name not in GRAPH_POLICIES), *scale.variants)
    )
    try:
        for name in names:
            parse_policy(name)
    except InvalidConfig as error:
        raise click.BadParameter(str(error), param_hint="--policy") from error
    why_no_groups = cgroups.why_not() if in_groups else "told not to (--no-cgroups)"
    if scale.on_gpu:
        why_no_groups = "they do not bound a GPU's memory"
    cgroups.remove_stale()
    chosen = [name for name in ALL_MODELS if name in (models or MODELS)]
    parent = cache_folder()  # on the disk that the packs are on
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-engine-", dir=parent) as scratch, Children() as children:
        bench = Bench(scale, names, Path(scratch), children, in_groups=why_no_groups is None)
        rows = bench.run(chosen)
    found = figures(rows)
    print(tables.table(rows))
    print()
    print(tables.aims(found))
    print(tables.by_model(found))
    groups = "memory cgroups" if why_no_groups is None else f"no memory cgroups ({why_no_groups}): peak RSS instead"
    print(f"\nbounded arms: {groups}")
    out.mkdir(parents=True, exist_ok=True)
    try:
        speed_plot.plot(rows, out / "engine.png")
        print(f"plot: {out / 'engine.png'}")
    except Exception as error:  # whatever a plotting library may do, the result is not lost
        print(f"no plot: {type(error).__name__}: {error}")
    result = {
        **found,
        "cgroups": why_no_groups is None,
        "why_no_cgroups": why_no_groups,
        "quick": quick,
        "machine": describe_machine(parent),
        "rows": [row_json(row, rows) for row in rows],
    }
    print(write_result(result, out / "engine.json"))
