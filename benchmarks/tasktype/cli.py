"""The command."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.results import write_result
from benchmarks.tasktype.origins import read_prompts
from benchmarks.tasktype.variants import VARIANTS
from greenroom.tasktype import Extractor
from greenroom.tasktype.evaluate import LabelledPrompt

BUDGETS_MS: Final = (1, 5, 20)
AIM: Final = 0.65


@click.command()
@click.option(
    "--data",
    envvar="GREENROOM_DATA",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder with prompts/task-types.jsonl (GREENROOM_DATA).",
)
@click.option(
    "--variant",
    "variants",
    multiple=True,
    type=click.Choice(list(VARIANTS)),
    help="What is measured; may be given again.  [default: all]",
)
@click.option(
    "--families",
    is_flag=True,
    help="Leave out whole families of data sets that word the wish alike, such as all reviews: harder.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Which prompts of a wording are learnt from.")
@click.option("--timed", type=click.IntRange(10), default=500, show_default=True, help="Prompts whose time is taken.")
@click.option(
    "--write-labelled",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Measure nothing: write the prompts with their origins, for `greenroom task-weights learn`, and end.",
)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A file for the JSON as well.")
def main(
    data: Path,
    variants: tuple[str, ...],
    families: bool,
    seed: int,
    timed: int,
    write_labelled: Path | None,
    out: Path | None,
) -> None:
    """How many task types of prompts are told right whose data set was not seen.

    Every data set is left out once: what is compared learns from the others, and is asked of it. task_accuracy_unseen
    is the mean over data sets. Nothing is learnt by `keywords`, whose authors had seen two thirds of the wordings.
    Times are of one extraction, on one core.

    \b
    Examples:
      python -m benchmarks.tasktype --data DATA_FOLDER
      python -m benchmarks.tasktype --variant keywords --variant linear
    """
    prompts = read_prompts(data / "prompts" / "task-types.jsonl", families=families)
    if write_labelled is not None:
        write_labelled.parent.mkdir(parents=True, exist_ok=True)
        write_labelled.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in prompts))
        return
    click.echo(describe_machine(cache_folder()))
    chosen = variants or tuple(VARIANTS)
    origins = len({one.origin for one in prompts})
    rows: dict[str, Any] = {}
    click.echo(_heading(prompts))
    with progress(origins * len(chosen), "origins left out", "fit") as bar:

        def advance() -> None:
            bar.update()

        for name in chosen:
            measured = VARIANTS[name](prompts, seed, advance)
            rows[name] = {
                "task_accuracy_unseen": statistics.fmean(measured.accuracy.values()),
                "by_origin": dict(measured.accuracy),
                "by_type": _by_type(prompts, measured.accuracy),
                "unknown": measured.unknown,
                "unknown_of_texts_without_a_wish": measured.quiet,
                **_milliseconds(measured.extractor, prompts[:: max(1, len(prompts) // timed)]),
            }
            bar.clear()
            click.echo(_line(name, rows[name]))
    for line in _by_origin(rows):
        click.echo(line)
    click.echo(
        write_result({"families": families, "task_accuracy_unseen": rows, "aim": AIM, "prompts": len(prompts)}, out)
    )


def _by_type(prompts: Sequence[LabelledPrompt], accuracy: Any) -> dict[str, float]:
    """The mean over the data sets that have a type. Nearly all have only one."""
    return {
        task_type: statistics.fmean(
            accuracy[origin] for origin in {o.origin for o in prompts if o.task_type == task_type}
        )
        for task_type in sorted({one.task_type for one in prompts})
    }


def _milliseconds(extractor: Extractor, prompts: Sequence[LabelledPrompt]) -> dict[str, float]:
    """CPU time of one extraction, by the process's own clock: what else the machine does is not counted."""
    times = []
    for one in prompts:
        began = time.process_time()
        extractor.extract(one.prompt)
        times.append(1e3 * (time.process_time() - began))
    times.sort()
    return {"ms_p50": statistics.median(times), "ms_p99": times[int(0.99 * (len(times) - 1))]}


def _heading(prompts: Sequence[LabelledPrompt]) -> str:
    types = "".join(f"{one:>11}" for one in sorted({one.task_type for one in prompts}))
    return f"{'':24}{'unseen':>8}{types}{'unknown':>9}{'ms p50':>8}{'p99':>7}  within"


def _line(name: str, row: dict[str, Any]) -> str:
    within = next((f"{budget} ms" for budget in BUDGETS_MS if row["ms_p99"] <= budget), "none")
    types = "".join(f"{share:11.3f}" for share in row["by_type"].values())
    return (
        f"{name:24}{row['task_accuracy_unseen']:8.3f}{types}{row['unknown']:9.3f}"
        f"{row['ms_p50']:8.2f}{row['ms_p99']:7.2f}  {within}"
    )


def _by_origin(rows: dict[str, Any]) -> Iterator[str]:
    best = max(row["task_accuracy_unseen"] for row in rows.values())
    yield f"task_accuracy_unseen {best:.3f}, aim ≥ {AIM}: {'met' if best >= AIM else 'missed'}"
    yield "by what was left out"
    for origin in sorted(next(iter(rows.values()))["by_origin"]):
        yield f"  {origin:22}" + "".join(f"{name} {row['by_origin'][origin]:.2f}  " for name, row in rows.items())
