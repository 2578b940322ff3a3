"""``greenroom coe demo``: a collaboration of experts that is made on the spot."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from greenroom.cli.numbers import SEED
from greenroom.cli.progress_bars import progress_bars
from greenroom.demo.board.component_types import TYPES

if TYPE_CHECKING:
    from greenroom.demo.board.drawing_tasks import DrawEach, DrawingTask, Drawn, DrawOne
    from greenroom.demo.board.training import Settings


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--types",
    type=click.IntRange(1, len(TYPES)),
    default=len(TYPES),
    show_default=True,
    help="Of so many types of components, each with an expert; and what these share.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same draws the same.")
@click.option("--quick", is_flag=True, help="Less of all, in a tenth of the time: to see that it runs.")
@click.option("--bundled", is_flag=True, help="Take the experts that come with the package; train none.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="To train with, and processes to draw with. Weights depend on it in their last bits.  [default: all cores]",
)
def demo(directory: Path, types: int, seed: int, quick: bool, bundled: bool, threads: int | None) -> None:
    """Make experts that inspect a circuit board, into DIR: an example of a collaboration.

    It draws components of a board, trains a small ResNet for each type and three for what several types share (which
    way round they lie), and prints how well each does on crops that none was trained on. DIR gets:

    \b
      board.toml                    which expert comes first for a component, and which next
      experts/NAME/                 checkpoints in the format of transformers
      samples/*.png samples.jsonl   crops to send, with what should be found of each
      board.png                     a whole board, and the order in which a camera takes its crops

    It takes some minutes on two cores; with --bundled a second, and no torch.

    \b
    Examples:
      greenroom coe demo board
      greenroom coe demo board --bundled
      greenroom coe demo board --types 4 --quick
    """
    from greenroom.coe.graph.definition_file import read_definition
    from greenroom.demo.board import DEFINITION_NAME
    from greenroom.demo.board.card import table
    from greenroom.demo.board.make import copy_board, train_board

    began = time.monotonic()
    with progress_bars() as on_progress:
        if bundled:
            if quick or types != len(TYPES):
                raise click.UsageError("--bundled takes all experts as they are: leave out --types and --quick")
            report = copy_board(directory, seed, on_progress)
        else:
            threads = threads or len(os.sched_getaffinity(0))
            report = train_board(
                directory, TYPES[:types], _settings(seed, quick, threads), on_progress, _drawing(threads)
            )
    read_definition(directory / DEFINITION_NAME)
    click.echo(table(report.experts))
    click.echo(f"{directory / DEFINITION_NAME}: made in {time.monotonic() - began:.0f} s")


def _settings(seed: int, quick: bool, threads: int) -> Settings:
    import torch

    from greenroom.demo.board.training import Settings

    torch.set_num_threads(threads)
    settings = Settings(seed=seed)
    return settings.quick if quick else settings


def _drawing(processes: int) -> DrawEach:
    from greenroom.replay.sweeps.processes import in_processes

    def draw_each(draw_one: DrawOne, tasks: Sequence[DrawingTask], finished: Callable[[], object]) -> list[Drawn]:
        return in_processes(draw_one, tasks, processes, finished)

    return draw_each
