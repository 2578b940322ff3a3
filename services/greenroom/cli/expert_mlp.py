"""``greenroom expert-mlp``: the network by which the policy duoserve:literal=true foresees a token's picks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import SEED
from greenroom.cli.recorded_sources import check_source, recorded_of, source_options, write_artifact

if TYPE_CHECKING:
    from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile


@click.group("expert-mlp")
def expert_mlp() -> None:
    """The network of --policy duoserve:literal=true."""


@expert_mlp.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("expert_mlp.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=512),
    default=100_000,
    show_default=True,
    help="Layers of tokens to learn from.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=6, show_default=True, help="Passes over them.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same sequences and seed give the same.")
@source_options
def fit(out: Path, samples: int, epochs: int, seed: int, **options: Any) -> None:
    """Train DuoServe-MoE's ExpertMLP, as printed, on many sequences' routing.

    It foresees a token's picks of the next layer from those of all layers before. MODEL, a folder or a hub id, is what
    runs the prompts, as --model is; without either it is the bundled model.

    \b
    Examples:
      greenroom expert-mlp fit --prompts prompts.jsonl
      greenroom expert-mlp fit ./checkpoint --prompts prompts.txt --out ./checkpoint/expert_mlp.safetensors
      greenroom expert-mlp fit --trace monday.npz --trace tuesday.npz
      greenroom serve --expert-memory 33% --policy duoserve:literal=true --expert-mlp expert_mlp.safetensors
    """
    check_source(options, out)
    recorded = recorded_of(options)

    from dataclasses import replace

    from tqdm import tqdm

    from greenroom.predictor.kinds.expert_mlp.training import TrainingOptions, train
    from greenroom.replay.traces.join import joined

    training = TrainingOptions(samples=samples, epochs=epochs, seed=seed)
    with tqdm(desc="training", unit="sample", unit_scale=True, disable=not sys.stderr.isatty()) as bar:
        made = replace(train(joined(recorded.traces), training, on_batch=bar.update), model=recorded.model)
    write_artifact(made, out)
    click.echo(f"{out}: {_said(made)}")


@expert_mlp.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """What is in FILE.

    \b
    Example:
      greenroom expert-mlp show expert_mlp.safetensors
    """
    from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile

    found = ExpertMlpFile.read(file)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "model": found.model, "sequences": found.sequences, "experts_per_layer": found.experts_per_layer,
                    "version": found.version, "created_ms": found.created_ms, **found.of._asdict(), **found.report,
                }
            )
        )  # fmt: skip
        return
    click.echo(f"{file}: {_said(found)}")


def _said(found: ExpertMlpFile) -> str:
    from greenroom.core.units import format_bytes

    of = f" of {found.model}" if found.model else ""
    loss = found.report.get("held_out_loss")
    measured = "" if loss is None else f"; log loss an expert, held out, {loss:.4f}"
    return f"{format_bytes(found.weights.nbytes)}, fitted to {found.sequences} sequences{of}, {found.shape}{measured}"
