"""Types of options that are numbers, where click's own take what no command can use."""

from __future__ import annotations

import math
from typing import Any, Final

import click

SEED: Final = click.IntRange(min=0, max=2**32 - 1)
"""Of random numbers, as numpy and torch both take it."""


class NumberRange(click.FloatRange):
    """``click.FloatRange`` lets NaN through: it is neither below nor above a bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{value} is no number.", param, ctx)
        return found
