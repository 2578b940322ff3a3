"""Keeps the garbage collector from walking what was made at the start."""

from __future__ import annotations

import gc
import logging
import time

from greenroom.fabric.lifecycle.service import Part

_LOG = logging.getLogger(__name__)


class StartIsKept(Part):
    """To be started last in a process of its own. Modules, models and parts live as long as the process, and a full
    collection that walks them stops everything for longer than a step takes. Later collections walk only what requests
    have left. ``--log-level debug`` logs how long the collection at the start took."""

    def __init__(self) -> None:
        super().__init__("garbage collection")

    async def start(self) -> None:
        began = time.perf_counter()
        gc.collect()
        _LOG.debug("a collection of all that was made at the start took %.0f ms", (time.perf_counter() - began) * 1000)
        gc.freeze()

    async def stop(self) -> None:
        gc.unfreeze()  # else libraries report leaks at the process's end
        await super().stop()
