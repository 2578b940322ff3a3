"""Versions of statistics: written, served, pinned, handed out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from greenroom.predictor.kinds.statistics.library import Library
from greenroom.predictor.kinds.statistics.served import Served, Showcase
from greenroom.predictor.kinds.statistics.snapshot import ArtifactInfo, Snapshot
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.versions.registry import Shelf
from greenroom.predictor.versions.store import ArtifactStore

_LOG = logging.getLogger(__name__)


class Publisher(Shelf[Snapshot, Served]):
    """Between what is learnt, what is kept and what is served."""

    def __init__(
        self,
        library: Library,
        store: ArtifactStore,
        metrics: PredictorMetrics,
        *,
        now_ms: Callable[[], int] = lambda: round(time.time() * 1000),
    ) -> None:
        super().__init__(store)
        self.showcase = Showcase()
        self.learning = asyncio.Lock()
        """Held by whoever learns, or copies what was learnt."""
        self._library = library
        self._metrics = metrics
        self._now_ms = now_ms

    async def open(self) -> None:
        """Go on from what is kept. Raises InvalidConfig."""
        async with self._turn:
            newest = await self._blocking(self._store.open)
            for snapshot in sorted(newest, key=lambda one: one.created_ms):
                for gone in self._library.restore(snapshot):
                    _LOG.warning("%r, %r: not taken up again, the budget of bytes is full", gone.model, gone.task_type)
                _LOG.info(
                    "%r goes on from version %d, of %d sequences",
                    snapshot.model, snapshot.version, snapshot.everything.sequences,
                )  # fmt: skip
            for snapshot in newest:
                await self._show(snapshot)

    async def publish(self, model: str) -> ArtifactInfo | None:
        """What is known of ``model`` now, as its next version; None where nothing is, or nothing new. Raises OSError;
        then nothing has changed."""
        async with self._turn:
            began = time.monotonic()
            async with self.learning:
                known = self._library.models.get(model)
                if known is None or not known.unsaved:
                    return None
                version = self._store.next_version(model)
                snapshot = await self._blocking(self._library.snapshot, model, version, self._now_ms())
                before, known.unsaved = known.unsaved, 0
            try:
                info = await self._blocking(self._store.write, snapshot)
            except BaseException:
                known.unsaved += before
                raise
            known.version = snapshot.version
            self._metrics.published.inc()
            self._metrics.publishing.observe(time.monotonic() - began)
            if self._store.pinned(model) is None:
                self._serve(snapshot, Served(snapshot))
            return info

    def serving(self, model: str) -> int:
        served = self.showcase.models.get(model)
        return 0 if served is None else served.snapshot.version

    async def _prepare(self, artifact: Snapshot) -> Served:
        return Served(artifact)

    def _serve(self, artifact: Snapshot, prepared: Served) -> None:
        self.showcase.models[artifact.model] = prepared
        self._metrics.serving(artifact.model, artifact.version)

    def _withdraw(self, model: str) -> None:
        if self.showcase.models.pop(model, None) is not None:
            self._metrics.not_serving(model)
