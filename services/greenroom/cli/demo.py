"""``greenroom demo``: things made from the bundled model."""

from __future__ import annotations

from pathlib import Path

import click

from greenroom.cli.numbers import NumberRange
from greenroom.demo import bundled_model_path


@click.group()
def demo() -> None:
    """Things made from the bundled model.

    \b
    Example:
      greenroom demo widen --expert-mib 11 /tmp/wide
    """


@demo.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--expert-mib", type=NumberRange(min=0.01), default=11, show_default=True, help="Size of an expert at least."
)
def widen(directory: Path, expert_mib: float) -> None:
    """Write the bundled model with its experts zero-padded to a real size into DIRECTORY.

    The same function and the same trained routing, but transfers of a real size: what benchmarks of offloading need.

    \b
    Example:
      greenroom demo widen --expert-mib 11 /tmp/wide && greenroom serve --model /tmp/wide --expert-memory 33%
    """
    from greenroom.demo.widen import widen as write

    write(bundled_model_path(), directory, expert_mib)
    click.echo(directory)
