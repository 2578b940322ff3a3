"""What was made at the start is not looked at again by the garbage collector."""

from __future__ import annotations

import gc

from greenroom.fabric.lifecycle.service import Part


class StartIsKept(Part):
    """To be started last in a process of its own: modules, models and parts are there for as long as it lives, and a
    full collection that walks them stops everything for 50 ms in a gateway and 180 ms in a worker. Afterwards it
    walks what requests have left."""

    def __init__(self) -> None:
        super().__init__("garbage collection")

    async def start(self) -> None:
        gc.collect()
        gc.freeze()

    async def stop(self) -> None:
        gc.unfreeze()  # what ends with the process is collected at its end, or libraries report leaks
        await super().stop()
