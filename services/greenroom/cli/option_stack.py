"""Several options as one decorator, and all but one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def stack(*options: Callable[[F], F]) -> Callable[[F], F]:
    """All of ``options`` on a command, listed by its help in this order."""

    def apply(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


def without(name: str) -> Callable[[F], F]:
    """The options that a command has so far, but for the one of this name: it has another of its own."""

    def apply(command: F) -> F:
        given: list[click.Parameter] = command.__dict__["__click_params__"]
        given[:] = [one for one in given if one.name != name]
        return command

    return apply
