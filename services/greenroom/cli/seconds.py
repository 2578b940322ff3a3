"""Options in seconds, for settings that are kept in milliseconds: a refusal names what the user wrote."""

from __future__ import annotations

import math
from collections.abc import Callable

import click


def above_0(most: float = math.inf) -> Callable[[click.Context, click.Parameter, float], float]:
    """The callback of an option that takes a number of seconds above 0, and at most ``most``."""
    bound = "" if math.isinf(most) else f" and at most {most:g}"

    def check(context: click.Context, option: click.Parameter, seconds: float) -> float:
        if not 0 < seconds <= most or math.isinf(seconds):
            allowed = f"it is a number of seconds above 0{bound}"
            raise click.BadParameter(f"{seconds:g} is not allowed; {allowed}", context, option)
        return seconds

    return check
