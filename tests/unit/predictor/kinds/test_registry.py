"""Workers may ask for exactly the kinds that the predictor makes forecasts from."""

from __future__ import annotations

from greenroom.core.artifacts.forecast_kinds import PREDICTORS, STATISTICS
from greenroom.predictor.kinds.registry import FORECAST_KINDS


def test_every_kind_of_forecasts_has_a_name_that_workers_know() -> None:
    assert (STATISTICS, *FORECAST_KINDS) == PREDICTORS
