"""``greenroom predictor``: which experts the next prompts will need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.service_options import (
    dialer_options,
    endpoint_from,
    listen_options,
    log_options,
    process_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

    from greenroom.fabric.lifecycle import Service
    from greenroom.fabric.log import Log


@click.command()
@log_options
@process_options
@listen_options
@dialer_options
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where what was learnt is kept.  [default: in memory, until it ends]",
)
@click.option(
    "--half-life",
    type=float,
    default=500.0,
    show_default=True,
    help="A sequence counts half when so many others of its task type have come since.",
)
@click.option(
    "--publish-every", type=int, default=256, show_default=True, help="A new version after so many sequences."
)
@click.option(
    "--publish-after",
    type=float,
    default=10.0,
    show_default=True,
    help="A new version after so many seconds with at least one sequence.",
)
@click.option("--keep", type=int, default=5, show_default=True, help="Versions that are kept of a model.")
@click.option(
    "--max-memory", default="256MiB", show_default=True, help="For what is known of all models and task types."
)
def predictor(
    state_dir: Path | None,
    half_life: float,
    publish_every: int,
    publish_after: float,
    keep: int,
    max_memory: str,
    **options: Any,
) -> None:
    """Learn from the topic `traces` which experts are used, and answer forecasts over gRPC.

    One of these is meant to run. Without one, workers go on with what they know themselves. SIGTERM or Ctrl-C: what
    was learnt is kept, then it ends.

    \b
    Examples:
      greenroom predictor --brokers kafka:9092 --listen 0.0.0.0:7002 --state-dir /var/lib/greenroom/predictor
      greenroom predictor --state-dir ./predictor --half-life 100 --publish-every 32
    """
    from greenroom.cli.service_process import live
    from greenroom.core.units import parse_bytes
    from greenroom.predictor import PredictorConfig, PredictorMetrics, PredictorService, make_store
    from greenroom.predictor.process import predictor_parts

    config = PredictorConfig(
        state_dir=state_dir,
        half_life_sequences=half_life,
        publish_every=publish_every,
        publish_after_s=publish_after,
        keep=keep,
        max_bytes=parse_bytes(max_memory, field="max_memory"),
    )

    endpoint = endpoint_from(options)

    def make(log: Log, registry: CollectorRegistry, instance: str) -> Sequence[Service]:
        service = PredictorService(config, log, make_store(state_dir, keep), PredictorMetrics(registry))
        return predictor_parts(service, config, log, endpoint, instance)

    sys.exit(live("predictor", options, make))
