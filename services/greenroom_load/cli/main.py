"""``greenroom-load``: the group of its commands."""

from __future__ import annotations

import logging
import sys

import click

from greenroom import __version__
from greenroom.core.command_group import CommandGroup
from greenroom_load.cli.plot import plot
from greenroom_load.cli.run import run
from greenroom_load.cli.sweep import sweep


@click.group(
    cls=CommandGroup,
    context_settings={
        "auto_envvar_prefix": "GREENROOM_LOAD",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="Every option can be set in the environment: --request-rate of run is GREENROOM_LOAD_RUN_REQUEST_RATE.",
)
@click.version_option(__version__, prog_name="greenroom-load")
def main() -> None:
    """Send traffic to a language model server and report what its users would feel.

    It drives greenroom over HTTP or gRPC, and anything else with OpenAI's HTTP API.

    \b
    Examples:
      greenroom-load run --request-rate 4 --duration 60
      greenroom-load run --trace azure.csv --time-scale 0.5 --prompts mine.jsonl --plot load
      greenroom-load sweep --rates 1,2,4,8 --goodput ttft:500 tpot:50 --json sweep.json --plot load
      greenroom-load plot before.json after.json --out compare
    """
    logging.basicConfig(level="WARNING", stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")


main.add_command(run)
main.add_command(sweep)
main.add_command(plot)
