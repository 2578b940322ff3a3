"""``greenroom coe``: collaborations of experts, pipelines of whole models."""

from __future__ import annotations

import click

from greenroom.cli.coe_demo import demo


@click.group()
def coe() -> None:
    """Collaborations of experts (CoE): pipelines of whole models.

    \b
    Example:
      greenroom coe demo board        experts that inspect a circuit board, trained here, and crops to send them
    """


coe.add_command(demo)
