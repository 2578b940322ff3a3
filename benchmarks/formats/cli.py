"""The command line of `make bench-formats`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.formats import arms, speed_plot, tables
from benchmarks.formats.figures import figures, row_json
from benchmarks.formats.models import MODELS, STORED, FormatModel
from benchmarks.harness.children import cgroups
from benchmarks.harness.children.child_rounds import run_stage
from benchmarks.harness.children.greenroom_child import CONCURRENCY, parse_policy
from benchmarks.harness.children.processes import ArmFailed, Children, exit_on_sigterm
from benchmarks.harness.inputs.token_streams import random_stream
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.plots import picture
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.results import write_result
from benchmarks.harness.rows import Row
from greenroom.core.errors import InvalidConfig
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import kept_format
from greenroom.moe.loading.packing import resolve_dtype

EXAMPLES = """
\b
Examples:
  make bench-formats                                      the whole, within an hour; leave the machine alone meanwhile
  make bench-formats QUICK=1                              a smoke run of about three minutes, on small models
  python -m benchmarks.formats --format mxfp4 --rounds 5
"""


@click.command(epilog=EXAMPLES)
@click.option("--format", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only these.  [default: all]")
@click.option("--rounds", type=click.IntRange(min=1), help="Measured rounds at most, after one that warms up.")
@click.option("--minutes", type=click.FloatRange(min=0), default=50.0, show_default=True,
              help="No new round of a format once its share of this is over.")  # fmt: skip
@click.option("--policy", default="look-ahead", show_default=True, metavar="NAME[:OPTION=VALUE,...]",
              help="Where not all experts fit.")  # fmt: skip
@click.option("--quick", is_flag=True, help="Small models, one round: to see that it works, not how fast.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("artifacts/bench-formats"),
              show_default=True, help="Folder for the plot (formats.png) and the result (formats.json).")  # fmt: skip
def main(names: tuple[str, ...], rounds: int | None, minutes: float, policy: str, quick: bool, out: Path) -> None:
    """Experts as they are stored beside the same in bf16: all resident, in the bytes of bf16's third, and a third of
    their own.

    Prints a table, writes a plot, and prints all of it as one JSON object on its last line.
    """
    exit_on_sigterm()
    try:
        parse_policy(policy)
    except InvalidConfig as error:
        raise click.BadParameter(str(error), param_hint="--policy") from error
    why_no_groups = cgroups.why_not()
    cgroups.remove_stale()
    chosen = [name for name in MODELS if name in (names or MODELS)]
    rounds = rounds or (1 if quick else 5)
    rows: list[Row] = []
    stored_bytes: dict[str, int] = {}
    with Children() as children, progress(None, "preparing", "turn") as bar:

        def tell(turns: int, what: str) -> None:
            bar.set_description(what)
            bar.update(turns)

        for name in chosen:
            bar.set_description(f"{name}: preparing")
            prepared = _prepared(name, MODELS[name], children, policy, quick, in_groups=why_no_groups is None)
            if isinstance(prepared, Row):
                rows.append(prepared)
                continue
            if not MODELS[name].of_numbers:
                stored_bytes[name] = _stored_expert_bytes(prepared.folder)
            stage = arms.stage(prepared, policy, rounds, 60 * minutes / len(chosen))
            bar.total = (bar.total or 0) + stage.turns
            bar.refresh()
            rows += run_stage(stage, children, tell=tell)
            children.close_all_but()
    found = figures(rows, stored_bytes)
    print(tables.table(rows))
    print()
    print(tables.summary(found))
    groups = "memory cgroups" if why_no_groups is None else f"no memory cgroups ({why_no_groups})"
    print(f"\narms in bf16's third: {groups}")
    out.mkdir(parents=True, exist_ok=True)
    picture(lambda: speed_plot.plot(rows, out / "formats.png"), print)
    print(f"plot: {out / 'formats.png'}")
    result: dict[str, Any] = {
        **found,
        "cgroups": why_no_groups is None,
        "quick": quick,
        "policy": policy,
        "machine": describe_machine(cache_folder()),
        "rows": [row_json(row) for row in rows],
    }
    print(write_result(result, out / "formats.json"))


def _prepared(
    name: str, model: FormatModel, children: Children, policy: str, quick: bool, *, in_groups: bool
) -> arms.Prepared | Row:
    """A row that says why, where it can not be made."""
    try:
        folder = model.make(quick)
        facts = children.get(arms.probe(folder, policy)).description
    except ArmFailed as error:
        return Row("prepare", name, name, error=str(error))
    finally:
        children.close_all_but()
    checkpoint = resolve(str(folder))
    tokens = 4 if quick else 16
    stream = random_stream(checkpoint.config.vocab_size, CONCURRENCY, tokens=tokens)
    return arms.Prepared(
        name=name,
        folder=folder,
        model=model,
        stream=stream,
        slot_budget_bytes=int(facts["experts_bytes"]),
        limit_bytes=int(facts["announced_bytes"]) if in_groups else None,
        cold=(folder,),
    )


def _stored_expert_bytes(folder: Path) -> int:
    """Of one expert in the checkpoint, the mean."""
    checkpoint = resolve(str(folder))
    plan = ExpertPlan(checkpoint, resolve_dtype(checkpoint, "auto"), kept_format(checkpoint, experts_as=STORED))
    return sum(tensor.nbytes for tensor in plan.stored) // sum(layer.experts for layer in plan.layers)
