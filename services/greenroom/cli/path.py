"""``greenroom path``: the weights by which the policy duoserve foresees a token's picks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import SEED
from greenroom.cli.option_stack import without
from greenroom.cli.recorded_sources import Recorded, check_source, recorded_of, source_options, write_artifact

if TYPE_CHECKING:
    from greenroom.core.artifacts.path_file import PathFile
    from greenroom.core.artifacts.reuse_file import ReuseFile


@click.group()
def path() -> None:
    """The weights of --policy duoserve: from a token's picks in earlier layers (`paths`: from the tokens)."""


@path.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("path.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--reuse",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What is known of each token's sequence, a file of `greenroom reuse fit`.  [default: fitted first]",
)
@click.option(
    "--window",
    type=click.IntRange(min=1),
    help="Layers before it that count.  [default: the fewest that foresee the sequences held out]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Passes over all tokens.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same sequences and seed give the same.")
@without("reuse")
@source_options
def fit(out: Path, reuse: Path | None, window: int | None, rounds: int, seed: int, **options: Any) -> None:
    """Fit, to many sequences' routing, what a token's picks in earlier layers say of its picks one and two layers on.

    It is a logistic regression a layer, on the token's own picks and on what is known of its sequence. What is foretold
    from tokens alone, before any layer has run, is `greenroom paths`. MODEL, a folder or a hub id, is what runs the
    prompts, as --model is; without either it is the bundled model.

    \b
    Examples:
      greenroom path fit --prompts prompts.jsonl
      greenroom path fit ./checkpoint --prompts prompts.txt --out ./checkpoint/path.safetensors
      greenroom path fit --trace monday.npz --trace tuesday.npz --reuse reuse.safetensors
      greenroom replay wednesday.npz --link 2GiB/s --path path.safetensors --policy duoserve --policy reuse
    """
    from greenroom.core.artifacts.reuse_file import ReuseFile

    check_source(options, out)
    known = None if reuse is None else ReuseFile.read(reuse)  # refused before the prompts have run
    made = _fitted(recorded_of(options), known, window, rounds, seed)
    write_artifact(made, out)
    click.echo(f"{out}: {_said(made)}")


@path.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """What is in FILE.

    \b
    Example:
      greenroom path show path.safetensors
    """
    from greenroom.core.artifacts.path_file import PathFile

    found = PathFile.read(file)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "model": found.model, "sequences": found.sequences, "experts_per_layer": found.experts_per_layer,
                    "version": found.version, "created_ms": found.created_ms, "weights": found.weights.size,
                    "mean_sequence": [round(float(one), 3) for one in found.sequence.mean(axis=1)], **found.report,
                }
            )
        )  # fmt: skip
        return
    click.echo(f"{file}: {_said(found)}")
    for ahead, (weight, loss) in enumerate(
        zip(found.sequence.mean(axis=1), found.report.get("held_out_loss", ()), strict=False), start=1
    ):
        click.echo(f"  {ahead} ahead: log loss an expert, held out, {loss:.4f}; the sequence counts {weight:.2f}")


def _fitted(recorded: Recorded, reuse: ReuseFile | None, window: int | None, rounds: int, seed: int) -> PathFile:
    from dataclasses import replace

    from tqdm import tqdm

    from greenroom.predictor.kinds.path.fit import FitOptions, fit
    from greenroom.predictor.kinds.reuse.fit import fit as fit_reuse
    from greenroom.replay.traces.join import joined

    trace = joined(recorded.traces)
    passes = 2 if reuse is None else 1
    with tqdm(total=passes * trace.layers, desc="fitting", unit="layer", disable=not sys.stderr.isatty()) as bar:
        if reuse is None:
            reuse = fit_reuse(trace, on_layer=lambda _: bar.update())
        options = FitOptions(rounds=rounds, seed=seed, window=window)
        made = fit(trace, reuse, options, on_layer=lambda _: bar.update())
    return replace(made, model=recorded.model)


def _said(found: PathFile) -> str:
    from greenroom.core.units import format_bytes

    of = f" of {found.model}" if found.model else ""
    layers = int(found.window[0])
    reach = f"{layers} layers before it" if layers > 1 else "the layer before it"
    return f"{reach}, {format_bytes(found.weights.nbytes)}, fitted to {found.sequences} sequences{of}, {found.shape}"
