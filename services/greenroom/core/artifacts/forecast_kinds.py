"""The kinds that the predictor makes forecasts from, by the names that workers ask for them with."""

from __future__ import annotations

from typing import Final

STATISTICS: Final = "statistics"
EMOE_A: Final = "emoe-a"
EMOE_L: Final = "emoe-l"

PREDICTORS: Final = (STATISTICS, EMOE_A, EMOE_L)
