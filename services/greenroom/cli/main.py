"""``greenroom``: the group of all commands."""

from __future__ import annotations

import logging
import sys

import click

from greenroom import __version__
from greenroom.cli.coe import coe
from greenroom.cli.demo import demo
from greenroom.cli.eamc import eamc
from greenroom.cli.expert_mlp import expert_mlp
from greenroom.cli.gateway import gateway
from greenroom.cli.generate import generate
from greenroom.cli.info import info
from greenroom.cli.keys import keys
from greenroom.cli.keywords import keywords
from greenroom.cli.pack import pack
from greenroom.cli.path import path
from greenroom.cli.paths import paths
from greenroom.cli.predictor import predictor
from greenroom.cli.predictor_train import predictor_train
from greenroom.cli.profile import profile
from greenroom.cli.replay import replay
from greenroom.cli.residual import residual
from greenroom.cli.reuse import reuse
from greenroom.cli.scheduler import scheduler
from greenroom.cli.serve import serve
from greenroom.cli.task_weights import task_weights
from greenroom.cli.tasktype import tasktype
from greenroom.cli.trace import trace
from greenroom.cli.worker import worker
from greenroom.core.command_group import CommandGroup
from greenroom.moe.openmp_waits import wait_briefly
from greenroom.moe.torch_compiler import compiler_on_demand


@click.group(
    cls=CommandGroup,
    context_settings={
        "auto_envvar_prefix": "GREENROOM",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    epilog="Every option can be set in the environment: --expert-memory of serve is GREENROOM_SERVE_EXPERT_MEMORY.",
)
@click.version_option(__version__, prog_name="greenroom")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged to stderr.",
)
def main(log_level: str) -> None:
    """Serve Mixture-of-Experts models whose experts do not fit in memory.

    \b
    Examples:
      greenroom serve                                      the bundled model on http://127.0.0.1:8000
      greenroom serve --model DIR --expert-memory 8GiB     a checkpoint of yours
      greenroom generate "Hello! I am Leo."                without a server
      greenroom info MODEL                                 what a checkpoint needs and what fits
      greenroom profile MODEL --tasks FILE                 what a model is like, by task type
      greenroom trace --prompts FILE --out T.npz           record which experts prompts are routed to
      greenroom replay T.npz --plot hits.png               which policy and budget suit that routing
      greenroom predictor-train T.npz                      what can be foretold of that routing, and by what
      greenroom eamc build MODEL --prompts FILE            what --policy moe-infinity predicts by
      greenroom reuse fit --prompts FILE                   what --policy reuse predicts by
      greenroom path fit --prompts FILE                    what --policy duoserve predicts by
      greenroom paths fit --prompts FILE                   what --policy expertflow foretells from tokens
      greenroom expert-mlp fit --prompts FILE              what --policy duoserve:literal=true predicts by
      greenroom residual fit --prompts FILE                what foresees more than routers run ahead
      greenroom keywords learn FILE --output mine.json     what tells your kinds of tasks apart
      greenroom task-weights learn FILE --output mine.json the same, from prompts of several origins
      greenroom coe check board.toml                       a pipeline of whole models: is it sound
      greenroom coe demo DIR                               experts that inspect a circuit board, to try
      greenroom keys add ann                               who may use a server that others can reach

    \b
    In processes of their own, on a Kafka log: gateway, tasktype, scheduler, predictor, worker.
    """
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    compiler_on_demand()
    wait_briefly()


for _command in (serve, gateway, tasktype, scheduler, predictor, worker, keys):
    main.add_command(_command)
main.add_command(generate)
main.add_command(info)
main.add_command(pack)
main.add_command(profile)
main.add_command(trace)
main.add_command(replay)
main.add_command(predictor_train)
main.add_command(keywords)
main.add_command(task_weights)
main.add_command(eamc)
main.add_command(path)
main.add_command(paths)
main.add_command(expert_mlp)
main.add_command(reuse)
main.add_command(residual)
main.add_command(demo)
main.add_command(coe)
