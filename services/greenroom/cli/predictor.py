"""``greenroom predictor``: which experts the next prompts will need."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.building_options import building_from, building_options
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
@click.option(
    "--learn",
    default="asked",
    show_default=True,
    help="Predictors to learn beside the statistics: emoe-a, emoe-l, or both separated by commas; `asked`: those that "
    "workers ask for; none.  Needs greenroom[torch].",
)
@click.option(
    "--learn-model",
    type=click.Choice(["xlnet", "gpt2", "bert"]),
    default="xlnet",
    show_default=True,
    help="What learns.",
)
@click.option(
    "--learn-after", type=int, default=200, show_default=True, help="Learn when so many sequences of a model have come."
)
@click.option("--learn-again", type=int, default=1000, show_default=True, help="And anew when so many more have come.")
@click.option(
    "--learn-memory", default="64MiB", show_default=True, help="For the last sequences of all models, to learn from."
)
@click.option(
    "--learn-timeout", type=float, default=900.0, show_default=True, help="Seconds that one training may take."
)
@click.option(
    "--learn-tolerance",
    type=float,
    default=0.01,
    show_default=True,
    help="By how much overlap with prompts it has not seen what was learnt may be worse than popularity, and than what "
    "is served; if it is worse it is kept and not served.",
)
@click.option(
    "--learn-asked-within",
    type=float,
    default=6 * 3600.0,
    show_default=True,
    help="With `asked`: seconds after which a kind is not learnt any more, unless it is asked for again.",
)
@click.option(
    "--learn-forecast-timeout",
    type=float,
    default=0.5,
    show_default=True,
    help="Seconds that a learned forecast may take; then statistics answer.",
)
@building_options
def predictor(
    state_dir: Path | None,
    half_life: float,
    publish_every: int,
    publish_after: float,
    keep: int,
    max_memory: str,
    learn: str,
    learn_model: str,
    learn_after: int,
    learn_again: int,
    learn_memory: str,
    learn_timeout: float,
    learn_tolerance: float,
    learn_asked_within: float,
    learn_forecast_timeout: float,
    **options: Any,
) -> None:
    """Learn from the topic `traces` which experts are used, and answer forecasts over gRPC.

    One of these is meant to run. Without one, workers go on with what they know themselves. SIGTERM or Ctrl-C: what
    was learnt is kept, then it ends.

    Predictors are trained in a process of their own, at the lowest priority; until one is there, statistics answer.
    `greenroom predictor-train` trains one from a recorded trace. In the same way it makes what expert policies predict
    by: the collection of moe-infinity when it foresees badly, the files of reuse, duoserve and expertflow after so many
    sequences. Workers take the new version while they serve.

    \b
    Examples:
      greenroom predictor --brokers kafka:9092 --state-dir /var/lib/greenroom/predictor
      greenroom predictor --state-dir ./predictor --half-life 100 --publish-every 32
      greenroom predictor --state-dir ./predictor --learn emoe-a,emoe-l --learn-after 500
      greenroom predictor --state-dir ./predictor --eamc-after 50 --eamc-least 0.4
    """
    from greenroom.cli.service_process import live
    from greenroom.core.units import parse_bytes
    from greenroom.predictor import PredictorConfig, PredictorMetrics, PredictorService
    from greenroom.predictor.kinds.registry import learning_of
    from greenroom.predictor.process import predictor_parts

    learning = learning_of(
        learn,
        backbone=learn_model,
        after=learn_after,
        again=learn_again,
        max_bytes=parse_bytes(learn_memory, field="learn_memory"),
        max_sequences=max(2000, 2 * learn_after),
        timeout_s=learn_timeout,
        tolerance=learn_tolerance,
        asked_within_s=learn_asked_within,
        forecast_s=learn_forecast_timeout,
    )
    building = building_from(options)
    config = PredictorConfig(
        state_dir=state_dir,
        half_life_sequences=half_life,
        publish_every=publish_every,
        publish_after_s=publish_after,
        keep=keep,
        max_bytes=parse_bytes(max_memory, field="max_memory"),
        learning=learning,
        building=building,
    )

    endpoint = endpoint_from(options)

    def make(log: Log, registry: CollectorRegistry, instance: str) -> Sequence[Service]:
        service = PredictorService(config, log, PredictorMetrics(registry))
        return predictor_parts(service, config, log, endpoint, instance)

    sys.exit(live("predictor", options, make))
