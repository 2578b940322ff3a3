"""``greenroom tasktype``: what kind of task each request describes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.service_options import log_options, process_options

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log import Log


@click.command()
@log_options
@process_options
@click.option(
    "--keywords",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keywords by task type: docs/architecture/tasktype.md.  [default: those that come with greenroom]",
)
@click.option(
    "--max-in-flight", type=int, default=256, show_default=True, help="Requests that are passed on at the same time."
)
@click.option(
    "--evaluate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Serve nothing: say how well the keywords tell the prompts of this JSONL file apart, and end.",
)
def tasktype(keywords: Path | None, max_in_flight: int, evaluate: Path | None, **options: Any) -> None:
    """Extract the task type of requests, from the topic `requests` to the topic `tasks`.

    Any number of these share the work. A type that the client gave is left as it is; else the type with the most
    keywords in the prompt is taken, or `unknown` where there are none. SIGTERM or Ctrl-C: what was read is passed on,
    then it ends.

    \b
    Examples:
      greenroom tasktype --brokers kafka:9092 --probe-port 9100
      greenroom tasktype --keywords mine.json
      greenroom tasktype --keywords mine.json --evaluate labelled.jsonl     {"prompt": ..., "task_type": ...} a line
    """
    if evaluate is not None:
        _evaluate(keywords, evaluate)
        return
    from greenroom.cli.service_process import live
    from greenroom.tasktype import Extractor, TaskTypeConfig, TaskTypeMetrics, TaskTypeService, load_profile
    from greenroom.tasktype.faults import after_append_fault

    config = TaskTypeConfig(keywords=keywords, max_in_flight=max_in_flight)
    extractor = Extractor(load_profile(keywords))
    fault = after_append_fault(os.environ)

    def make(log: Log, registry: CollectorRegistry, instance: str) -> list[Service]:
        metrics = TaskTypeMetrics(registry, extractor.names)
        return [TaskTypeService(config, log, extractor, metrics, after_append=fault)]

    sys.exit(live("tasktype", options, make))


def _evaluate(keywords: Path | None, prompts: Path) -> None:
    from greenroom.tasktype import Extractor, load_profile
    from greenroom.tasktype.evaluate import evaluate, read_labelled

    evaluation = evaluate(Extractor(load_profile(keywords)), read_labelled(prompts))
    click.echo(json.dumps(evaluation.report(), indent=2, ensure_ascii=False))
