"""Whether the generator itself was quick enough to be believed: its event loop's lag and its share of a core."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from greenroom_load.reply_record import clock

EVERY_S = 0.02
_KEPT = 500_000  # the last three hours


class Watch:
    """Runs beside the requests. ``lags_s``: how much later than due its own timer came, every 20 ms.

    Timers of the event loop have a grain of 1 ms, so a lag of up to that is none.
    """

    def __init__(self) -> None:
        self.lags_s: deque[float] = deque(maxlen=_KEPT)
        self._began = clock()
        self._cpu_began = time.process_time()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            due = clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.lags_s.append(max(0.0, clock() - due))

    @property
    def cpu_share(self) -> float:
        """Of one core, since it was made."""
        return (time.process_time() - self._cpu_began) / max(1e-9, clock() - self._began)
