"""A line on the terminal while a run goes on: how far it is, and what comes back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tqdm import tqdm

from greenroom_load.plan import Bounds
from greenroom_load.reply_record import Meter, clock

_EVERY_S = 0.5


@asynccontextmanager
async def progress(meter: Meter, bounds: Bounds, *, label: str, shown: bool | None) -> AsyncIterator[None]:
    """Draws on stderr while it is open. ``shown`` None: if stderr is a terminal."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield
        return
    drawing = asyncio.create_task(_draw(meter, bounds, label))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait({drawing})
        if not drawing.cancelled():
            drawing.result()


async def _draw(meter: Meter, bounds: Bounds, label: str) -> None:
    by_time = bounds.num_requests is None
    total = bounds.duration_s if by_time else bounds.num_requests
    form = "{desc} {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} {unit} [{elapsed}{postfix}]"
    began: float | None = None
    with tqdm(total=total, desc=label, unit="s" if by_time else "done", bar_format=form, leave=False) as bar:
        before = _Seen(meter)
        while True:
            await asyncio.sleep(_EVERY_S)
            if began is None and meter.sent:
                began = clock()  # behind the warm-up
            done = 0.0 if began is None else clock() - began
            bar.n = min(total or 0, done if by_time else meter.finished + meter.failed)
            now = _Seen(meter)
            bar.set_postfix_str(now.since(before), refresh=False)
            bar.refresh()
            before = now


class _Seen:
    """The meter as it stood at one time."""

    def __init__(self, meter: Meter) -> None:
        self.at = clock()
        self.sent = meter.sent
        self.failed = meter.failed
        self.in_flight = meter.in_flight
        self.gaps = meter.gap_count
        self.gap_sum_s = meter.gap_sum_s

    def since(self, before: _Seen) -> str:
        rate = (self.sent - before.sent) / max(1e-9, self.at - before.at)
        gaps = self.gaps - before.gaps
        itl = f"{(self.gap_sum_s - before.gap_sum_s) / gaps * 1e3:.1f} ms" if gaps else "-"
        return f"{rate:.1f}/s sent, {self.in_flight} in flight, {self.failed} errors, ITL {itl}"
