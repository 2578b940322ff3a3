"""Work for other processes: a module of its own, so that starting them is quick."""

from __future__ import annotations

import os
from collections.abc import Callable

from greenroom.core.errors import InvalidConfig


def refuse(item: int, go_on: Callable[[], None]) -> int:
    raise InvalidConfig("item", item, "another")


def die(item: int, go_on: Callable[[], None]) -> int:
    if item == 2:
        os._exit(9)
    return item


def forever_but_the_first(item: int, go_on: Callable[[], None]) -> int:
    while item:
        go_on()
    return item
