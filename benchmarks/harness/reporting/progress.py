"""Progress bars on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(total: int | None, what: str, unit: str = "run") -> tqdm[Any]:
    """A bar over ``total`` units; a context manager, advanced with ``update``."""
    return tqdm(total=total, desc=what, unit=unit, disable=not sys.stderr.isatty())


def each(items: Iterable[T], what: str, unit: str = "round") -> Iterable[T]:
    """The items, with a bar that counts them."""
    found: Iterable[T] = tqdm(items, desc=what, unit=unit, disable=not sys.stderr.isatty())
    return found
