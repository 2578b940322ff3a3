"""Options in seconds, for settings that are kept in milliseconds: a refusal names what the user wrote."""

from __future__ import annotations

import math
from collections.abc import Callable

import click


def above_0(most: float = math.inf, *, never: bool = False) -> Callable[[click.Context, click.Parameter, float], float]:
    """The callback of an option that takes a number of seconds above 0, and at most ``most``. ``never``: 0 too."""
    bound = "" if math.isinf(most) else f" and at most {most:g}"

    def check(context: click.Context, option: click.Parameter, seconds: float) -> float:
        if (not 0 < seconds <= most or math.isinf(seconds)) and not (never and seconds == 0):
            allowed = f"it is a number of seconds above 0{bound}{', or 0 for never' if never else ''}"
            raise click.BadParameter(f"{seconds:g} is not allowed; {allowed}", context, option)
        return seconds

    return check
