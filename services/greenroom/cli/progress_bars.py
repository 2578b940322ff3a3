"""A progress bar for each of several things that are done one after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """To be told what is done, how many steps of it are, and of how many. Shown on a terminal only."""
    from tqdm import tqdm

    with ExitStack() as stack:
        shown: dict[str, tqdm[Any]] = {}

        def on(what: str, done: int, of: int) -> None:
            if what not in shown:
                stack.close()
                shown[what] = stack.enter_context(
                    tqdm(total=of, desc=what, unit="step", disable=not sys.stderr.isatty())
                )
            shown[what].update(done - shown[what].n)

        yield on
