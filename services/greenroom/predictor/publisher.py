"""Versions: written, served, pinned, handed out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from greenroom.predictor.library import Library
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.serving import Served, Showcase
from greenroom.predictor.snapshot import ArtifactInfo, Snapshot, load_snapshot
from greenroom.predictor.store import ArtifactStore, NotKept
from greenroom.predictor.tensors import Damaged

_LOG = logging.getLogger(__name__)
R = TypeVar("R")


class Publisher:
    """Between what is learnt, what is kept and what is served.

    Each model's newest version is served, unless one was pinned by ``roll_back``: that one is, across restarts and
    whatever is published meanwhile, until another is pinned or none (version 0).
    """

    def __init__(
        self,
        library: Library,
        store: ArtifactStore,
        metrics: PredictorMetrics,
        *,
        now_ms: Callable[[], int] = lambda: round(time.time() * 1000),
    ) -> None:
        self.showcase = Showcase()
        self.learning = asyncio.Lock()
        """Held by whoever learns, or copies what was learnt."""
        self._library = library
        self._store = store
        self._metrics = metrics
        self._now_ms = now_ms
        self._turn = asyncio.Lock()
        """The store does one thing at a time."""

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

    async def close(self) -> None:
        async with self._turn:
            await self._blocking(self._store.close)

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
                self._serve(snapshot)
            return info

    async def forget(self, model: str) -> None:
        """All of what is kept and served of ``model``. Raises OSError."""
        async with self._turn:
            await self._blocking(self._store.forget, model)
            if self.showcase.models.pop(model, None) is not None:
                self._metrics.not_serving(model)

    def artifacts(self, model: str) -> tuple[list[ArtifactInfo], int]:
        """What is kept, oldest first, and the version that is served; 0: none."""
        served = self.showcase.models.get(model)
        return self._store.versions(model), 0 if served is None else served.snapshot.version

    async def read(self, model: str, version: int) -> tuple[ArtifactInfo, bytes]:
        """The file of ``version``; 0: of the one that is served. Raises NotKept."""
        async with self._turn:
            infos, serving = self.artifacts(model)
            wanted = version or serving
            data = await self._blocking(self._store.read, model, wanted)
            return next(info for info in infos if info.version == wanted), data

    async def roll_back(self, model: str, version: int) -> ArtifactInfo:
        """Serve ``version`` from now on; 0: the newest, and whatever becomes it. Raises NotKept, OSError."""
        async with self._turn:
            kept = self._store.versions(model)
            if not kept:
                raise NotKept(f"nothing is kept of the model {model!r:.100}")
            wanted = version or kept[-1].version
            snapshot = await self._blocking(self._load, model, wanted)
            await self._blocking(self._store.pin, model, version or None)
            self._serve(snapshot)
            _LOG.warning("%r: version %d is served now%s", model, wanted, "" if version else ", and those after it")
            return next(info for info in self._store.versions(model) if info.version == wanted)

    def _load(self, model: str, version: int) -> Snapshot:
        try:
            return load_snapshot(self._store.read(model, version))
        except Damaged as error:
            raise NotKept(f"version {version} of the model {model!r:.100} can not be read: {error}") from error

    async def _blocking(self, call: Callable[..., R], *arguments: object) -> R:
        """In a thread. Even if it is cancelled it does not return before the thread has, so the turn stays taken."""
        task = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is not None:
                _LOG.warning("a call that nobody waited for any more failed: %s", task.exception())
            raise

    async def _show(self, newest: Snapshot) -> None:
        """At the start: what was pinned, else the newest."""
        pinned = self._store.pinned(newest.model)
        if pinned is not None and pinned != newest.version:
            try:
                self._serve(await self._blocking(self._load, newest.model, pinned))
                return
            except NotKept as error:
                _LOG.warning("the newest is served: %s", error)
        self._serve(newest)

    def _serve(self, snapshot: Snapshot) -> None:
        self.showcase.models[snapshot.model] = Served(snapshot)
        self._metrics.serving(snapshot.model, snapshot.version)
