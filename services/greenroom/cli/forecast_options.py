"""What a worker asks the predictor for; the same for every command that has a worker in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from greenroom.cli.seconds import above_0
from greenroom.core.artifacts.forecast_kinds import PREDICTORS, STATISTICS
from greenroom.worker.service_config import predictor_for

forecast_predictor_option = click.option(
    "--forecast-predictor",
    type=click.Choice(PREDICTORS),
    help="What forecasts are made with: statistics, or a predictor that is learnt.  [default: emoe-a with --policy "
    "emoe, else statistics]",
)


artifact_every_option = click.option(
    "--artifact-every",
    type=float,
    callback=above_0(most=3600, never=True),
    default=10.0,
    show_default=True,
    help="Seconds after which it is looked again whether there is a newer version of what the policy predicts by "
    "(moe-infinity's EAMC, reuse's coefficients, duoserve's weights or network, expertflow's paths), rebuilt from live "
    "traces; 0: never.",
)


trace_tokens_option = click.option(
    "--trace-tokens",
    is_flag=True,
    help="Tell predictors each traced token too, which they learn from for --policy expertflow. Off unless asked for, "
    "since tokens are people's text: whoever may read the traces can read it. What is learnt of them, kept below "
    "--state-dir and handed to workers, lists token ids, pairs and triples that several sequences share (five; "
    "--paths-shared-by of the predictor).",
)


def artifacts_taken(policy: str, options: Mapping[str, Any], batching: str) -> frozenset[str]:
    """The kinds that the policies predict by; none for one that is not known, which is said elsewhere."""
    from greenroom.core.errors import InvalidConfig, UnknownName
    from greenroom.policies.registry import artifact_kinds

    try:
        return artifact_kinds(policy, options, batching)
    except (UnknownName, InvalidConfig):
        return frozenset()


def forecast_predictor(given: str | None, policy: str, *, all_fit: bool = False) -> str:
    """The option's value, or what is best for the policy. ``all_fit``: every expert is in memory; then nothing is made
    of forecasts, and the routing that a learnt predictor goes by is not recorded."""
    return given or (STATISTICS if all_fit else predictor_for(policy))
