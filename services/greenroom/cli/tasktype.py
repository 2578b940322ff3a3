"""``greenroom tasktype``: what kind of task each request describes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.service_options import log_options, process_options
from greenroom.core.errors import InvalidConfig

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log import Log


@click.command()
@log_options
@process_options
@click.option(
    "--extractor",
    type=click.Choice(("linear", "keywords", "embedding")),
    help="What tells task types apart (docs/architecture/tasktype.md).  [default: linear, or what your file is for]",
)
@click.option(
    "--keywords",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keywords of yours, for the extractor keywords.  [default: those that come with greenroom]",
)
@click.option(
    "--weights",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Weights of yours, for the extractor linear, which has some of its own, or embedding, which has none.",
)
@click.option(
    "--max-in-flight", type=int, default=256, show_default=True, help="Requests that are passed on at the same time."
)
@click.option(
    "--evaluate",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Serve nothing: say how well the extractor tells the prompts of this JSONL file apart, and end.",
)
def tasktype(
    extractor: str | None,
    keywords: Path | None,
    weights: Path | None,
    max_in_flight: int,
    evaluate: Path | None,
    **options: Any,
) -> None:
    """Extract the task type of requests, from the topic `requests` to the topic `tasks`.

    Any number of these share the work. A type that the client gave is left as it is; else the extractor finds it in
    the prompt, or says `unknown`. SIGTERM or Ctrl-C: what was read is passed on, then it ends.

    \b
    Examples:
      greenroom tasktype --brokers kafka:9092 --probe-port 9100
      greenroom tasktype --extractor keywords
      greenroom tasktype --keywords mine.json
      greenroom tasktype --keywords mine.json --evaluate labelled.jsonl     {"prompt": ..., "task_type": ...} a line
    """
    name, file = _chosen(extractor, keywords, weights)
    if evaluate is not None:
        _evaluate(name, file, evaluate)
        return
    from greenroom.cli.service_process import live
    from greenroom.tasktype import TaskTypeConfig, TaskTypeMetrics, TaskTypeService, open_extractor
    from greenroom.tasktype.faults import after_append_fault

    config = TaskTypeConfig(max_in_flight=max_in_flight)
    opened = open_extractor(name, file)
    fault = after_append_fault(os.environ)

    def make(log: Log, registry: CollectorRegistry, instance: str) -> list[Service]:
        metrics = TaskTypeMetrics(registry, opened.names, opened.name)
        return [TaskTypeService(config, log, opened, metrics, after_append=fault)]

    sys.exit(live("tasktype", options, make))


def _chosen(extractor: str | None, keywords: Path | None, weights: Path | None) -> tuple[str, Path | None]:
    """The extractor's name and its file. Raises InvalidConfig where a file is not for it."""
    name = extractor or ("keywords" if keywords is not None else "linear")
    if keywords is not None and name != "keywords":
        raise InvalidConfig("keywords", str(keywords), f"a file for the extractor {name}, or --extractor keywords")
    if weights is not None and name == "keywords":
        raise InvalidConfig("weights", str(weights), "a file of keywords, or --extractor linear or embedding")
    return name, keywords if name == "keywords" else weights


def _evaluate(name: str, file: Path | None, prompts: Path) -> None:
    from greenroom.tasktype import open_extractor
    from greenroom.tasktype.evaluate import evaluate, read_labelled

    evaluation = evaluate(open_extractor(name, file), read_labelled(prompts))
    click.echo(json.dumps(evaluation.report(), indent=2, ensure_ascii=False))
