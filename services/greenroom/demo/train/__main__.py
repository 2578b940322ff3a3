"""Trains the bundled model: `python -m greenroom.demo.train --out DIR`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import click
import torch

from greenroom.demo.train.batches import Settings
from greenroom.demo.train.trainer import train

_DEFAULTS: Final = Settings()


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where the model goes.")
@click.option("--steps", default=_DEFAULTS.steps, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=_DEFAULTS.tokens, show_default=True, type=click.IntRange(64), help="Tokens a step.")
@click.option("--minutes", default=None, type=click.FloatRange(0, min_open=True), help="End the schedule by then.")
@click.option("--routing", default=_DEFAULTS.routing, show_default=True, help="Weight of routing that differs by task.")
@click.option("--seed", default=_DEFAULTS.seed, show_default=True)
@click.option("--learning-rate", default=_DEFAULTS.learning_rate, show_default=True)
def main(
    out: Path, steps: int, tokens: int, minutes: float | None, routing: float, seed: int, learning_rate: float
) -> None:
    """Train the bundled model from nothing, or take the run in --out further."""
    torch.set_num_threads(1)
    settings = Settings(steps=steps, tokens=tokens, routing=routing, seed=seed, learning_rate=learning_rate)
    summary = train(settings, out, minutes=minutes)
    click.echo(json.dumps({key: value for key, value in summary.items() if key != "settings"}, indent=2))


if __name__ == "__main__":
    main()
