"""Versions of statistics: taken up at the start, and published of what has been counted since."""

from __future__ import annotations

import asyncio
import logging
import time

from greenroom.predictor.kinds.statistics.library import Library
from greenroom.predictor.kinds.statistics.served import Served
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.versions.artifact import ArtifactInfo
from greenroom.predictor.versions.registry import VersionRegistry, in_thread
from greenroom.predictor.versions.store import VersionStore

_LOG = logging.getLogger(__name__)


async def _served(snapshot: Snapshot) -> Served:
    return Served(snapshot)


class Publisher:
    """Between what is counted (``library``) and what is kept and served (``registry``)."""

    def __init__(self, library: Library, store: VersionStore[Snapshot], metrics: PredictorMetrics) -> None:
        self.registry: VersionRegistry[Snapshot, Served] = VersionRegistry(store, _served, metrics.serving)
        self.learning = asyncio.Lock()
        """Held while sequences are counted, or what was counted is copied."""
        self._library = library
        self._metrics = metrics

    async def open(self) -> None:
        """Go on from what is kept. Raises InvalidConfig."""
        newest = await self.registry.open()
        for snapshot in sorted(newest, key=lambda one: one.created_ms):
            for gone in self._library.restore(snapshot):
                _LOG.warning("%r, %r: not taken up again, the budget of bytes is full", gone.model, gone.task_type)
            _LOG.info("%r goes on from version %d, of %d sequences",
                      snapshot.model, snapshot.version, snapshot.sequences)  # fmt: skip
        await self.registry.show()

    async def publish(self, model: str) -> ArtifactInfo | None:
        """What is known of ``model`` now, as its next version; None where nothing is, or nothing new. One call at a
        time. Raises OSError; then nothing has changed."""
        began = time.monotonic()
        async with self.learning:
            known = self._library.models.get(model)
            if known is None or not known.unsaved:
                return None
            snapshot = await in_thread(self._library.snapshot, model)
            before, known.unsaved = known.unsaved, 0
        try:
            info = await self.registry.publish(snapshot)
        except BaseException:
            known.unsaved += before
            raise
        self._metrics.published.inc()
        self._metrics.publishing.observe(time.monotonic() - began)
        return info
