"""``greenroom reuse``: the coefficients that the policy reuse predicts by."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import SEED
from greenroom.cli.recorded_sources import Recorded, check_source, recorded_of, source_options, write_artifact

if TYPE_CHECKING:
    from greenroom.core.artifacts.reuse_file import ReuseFile


@click.group()
def reuse() -> None:
    """The coefficients of --policy reuse."""


@reuse.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("reuse.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option("--averages-only", is_flag=True, help="Do not try whether it helps to know which experts follow which.")
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Passes over all tokens.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same sequences and seed give the same.")
@source_options
def fit(out: Path, averages_only: bool, rounds: int, seed: int, **options: Any) -> None:
    """Fit, to many sequences' routing, how probable it is that a sequence's next token uses an expert.

    It is a logistic regression a layer on moving averages of what the sequence used, and on the picks of its last two
    tokens where that foresees more of the sequences that were not learnt from, the last tenth. MODEL, a folder or a hub
    id, is what runs the prompts, as --model is; without either it is the bundled model.

    \b
    Examples:
      greenroom reuse fit --prompts prompts.jsonl
      greenroom reuse fit ./checkpoint --prompts prompts.txt --out ./checkpoint/reuse.safetensors
      greenroom reuse fit --trace monday.npz --trace tuesday.npz
      greenroom replay wednesday.npz --reuse reuse.safetensors --policy reuse --policy next-use
    """
    check_source(options, out)
    made = _fitted(recorded_of(options), averages_only, rounds, seed)
    write_artifact(made, out)
    click.echo(f"{out}: {_said(made)}")


@reuse.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """What is in FILE.

    \b
    Example:
      greenroom reuse show reuse.safetensors
    """
    from greenroom.core.artifacts.reuse_file import ReuseFile

    found = ReuseFile.read(file)
    weights = [round(float(weight), 3) for weight in found.weights.mean(axis=0)]
    rates = [round(float(keep), 6) for keep in found.keep]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "model": found.model, "sequences": found.sequences, "experts_per_layer": found.experts_per_layer,
                    "version": found.version, "created_ms": found.created_ms, "keep": rates,
                    "mean_weights": weights, "mean_bias": round(float(found.bias.mean()), 3),
                    "followers": len(found.followers), **found.report,
                }
            )
        )  # fmt: skip
        return
    click.echo(f"{file}: {_said(found)}")
    for keep, weight in zip([*map(str, rates), "over all"], weights, strict=True):
        click.echo(f"  average {keep:<8} {weight:6.3f}  (mean over the layers)")
    click.echo(f"  bias             {found.bias.mean():6.3f}")


def _fitted(recorded: Recorded, averages_only: bool, rounds: int, seed: int) -> ReuseFile:
    from dataclasses import replace

    from tqdm import tqdm

    from greenroom.predictor.kinds.reuse.fit import FitOptions, fit
    from greenroom.replay.traces.join import joined

    options = FitOptions(rounds=rounds, seed=seed, followers=False if averages_only else None)
    trace = joined(recorded.traces)
    with tqdm(total=trace.layers, desc="fitting", unit="layer", disable=not sys.stderr.isatty()) as bar:
        made = fit(trace, options, on_layer=lambda _: bar.update())
    return replace(made, model=recorded.model)


def _said(found: ReuseFile) -> str:
    of = f" of {found.model}" if found.model else ""
    uses = "averages and the last two tokens' picks" if len(found.followers) else "averages"
    return f"{uses}, fitted to {found.sequences} sequences{of}, {found.shape}"
