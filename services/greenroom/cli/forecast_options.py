"""What a worker's forecasts are made with; the same for every command that has a worker in it."""

from __future__ import annotations

import click

from greenroom.worker.service_config import PREDICTORS, STATISTICS, predictor_for

forecast_predictor_option = click.option(
    "--forecast-predictor",
    type=click.Choice(PREDICTORS),
    help="What forecasts are made with: statistics, or a predictor that is learnt.  [default: emoe-a with --policy "
    "emoe, else statistics]",
)


def forecast_predictor(given: str | None, policy: str, *, all_fit: bool = False) -> str:
    """The option's value, or what is best for the policy. ``all_fit``: every expert is in memory; then nothing is made
    of forecasts, and the routing that a learnt predictor goes by is not recorded."""
    return given or (STATISTICS if all_fit else predictor_for(policy))
