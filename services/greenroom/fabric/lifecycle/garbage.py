"""What was made at the start is not looked at again by the garbage collector."""

from __future__ import annotations

import gc
import logging
import time

from greenroom.fabric.lifecycle.service import Part

_LOG = logging.getLogger(__name__)


class StartIsKept(Part):
    """To be started last in a process of its own: modules, models and parts are there for as long as it lives, and a
    full collection that walks them stops everything for longer than a step takes. Afterwards it walks what requests
    have left. ``--log-level debug`` says how long the one at the start took."""

    def __init__(self) -> None:
        super().__init__("garbage collection")

    async def start(self) -> None:
        began = time.perf_counter()
        gc.collect()
        _LOG.debug("a collection of all that was made at the start took %.0f ms", (time.perf_counter() - began) * 1000)
        gc.freeze()

    async def stop(self) -> None:
        gc.unfreeze()  # what ends with the process is collected at its end, or libraries report leaks
        await super().stop()
