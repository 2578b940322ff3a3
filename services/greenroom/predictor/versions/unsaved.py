"""What was learnt and is in no kept version yet, as the offsets of its traces."""

from __future__ import annotations

import asyncio

from greenroom.fabric.committable_offsets import PrefixTracker
from greenroom.predictor.metrics import PredictorMetrics

Offsets = list[tuple[PrefixTracker, int]]


class Unsaved:
    """By model, the offsets that wait for a version of it, or for it to be forgotten.

    A model stays here while its version is written, so that duplicates of its sequences wait too.

    ``most``: no more are read while so many wait. ``publish_every``: so many make a version due at once.
    """

    def __init__(self, *, most: int, publish_every: int, metrics: PredictorMetrics) -> None:
        self.something = asyncio.Event()
        """Set while anything is unsaved."""
        self.due = asyncio.Event()
        """Set when a version is to be made at once."""
        self.saved = asyncio.Event()
        """Set while nothing is unsaved."""
        self.saved.set()
        self._most = most
        self._publish_every = publish_every
        self._metrics = metrics
        self._offsets: dict[str, Offsets] = {}
        self._forgotten: set[str] = set()
        self._count = 0
        """With those that are being written now."""
        self._freed = asyncio.Event()

    def __contains__(self, model: str) -> bool:
        return model in self._offsets

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._offsets)

    async def room(self) -> int:
        """How many more may come. Waits until one may."""
        while self._count >= self._most:
            self._freed.clear()
            await self._freed.wait()
        return self._most - self._count

    def add(self, model: str, tracker: PrefixTracker, offset: int) -> None:
        """To be finished at ``tracker`` when a version of ``model`` is kept."""
        self._offsets.setdefault(model, []).append((tracker, offset))
        self.something.set()
        self.saved.clear()
        self._count += 1
        self._metrics.unsaved.set(self._count)
        if self._count >= self._publish_every:
            self.due.set()

    # -- models that are forgotten -------------------------------------------------------------------------------

    def forget(self, model: str) -> None:
        """Its versions are to go before the next one is made."""
        self._forgotten.add(model)
        self._offsets.setdefault(model, [])

    def to_forget(self, model: str) -> bool:
        return model in self._forgotten

    def forgotten(self, model: str) -> None:
        """Its versions have gone."""
        self._forgotten.discard(model)

    # -- writing versions ----------------------------------------------------------------------------------------

    def begin(self, model: str) -> Offsets:
        """A version is being written. Returns the offsets that it contains, for ``failed`` or ``kept``."""
        offsets, self._offsets[model] = self._offsets[model], []
        return offsets

    def failed(self, model: str, offsets: Offsets) -> None:
        self._offsets[model] = offsets + self._offsets[model]

    def kept(self, model: str, offsets: Offsets) -> None:
        for tracker, offset in offsets:
            tracker.finish(offset)
        self._count -= len(offsets)
        if not self._offsets[model] and model not in self._forgotten:
            del self._offsets[model]

    def written(self) -> None:
        """A version of every model was tried."""
        self._metrics.unsaved.set(self._count)
        self._freed.set()
        if not self._offsets:
            self.something.clear()
            self.saved.set()
