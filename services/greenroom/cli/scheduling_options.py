"""Options of which request goes where, and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from greenroom.policies.registry import PLACEMENT_POLICIES

F = TypeVar("F", bound=Callable[..., Any])


def scheduling_options(
    text: str, known: Iterable[str] = tuple(PLACEMENT_POLICIES), default: str = "fcfs"
) -> Callable[[F], F]:
    """``text``: what the help says of ``--scheduling``. ``known``: its values."""

    def add(command: F) -> F:
        command = click.option(
            "--scheduling-options", default="{}", show_default=True, help="Options of the scheduling, as JSON."
        )(command)
        return click.option(
            "--scheduling", type=click.Choice(sorted(known)), default=default, show_default=True, help=text
        )(command)

    return add


def parse_scheduling_options(options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Takes both out of ``options``: the policy's name and its options. Raises click.BadParameter."""
    name, text = options.pop("scheduling"), options.pop("scheduling_options")
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"this is no JSON ({error})", param_hint="--scheduling-options") from error
    if not isinstance(parsed, dict):
        raise click.BadParameter('write a JSON object such as {"patience_s": 10}', param_hint="--scheduling-options")
    return name, parsed
