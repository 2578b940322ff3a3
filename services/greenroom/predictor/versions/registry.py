"""Versions of one kind: what is kept, which is served, which is pinned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Generic, NamedTuple, ParamSpec, TypeVar

from greenroom.core.tensors import Damaged
from greenroom.predictor.metrics import ServedVersions
from greenroom.predictor.versions.artifact import A, ArtifactInfo
from greenroom.predictor.versions.store import NotKept, VersionStore

_LOG = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


class Serving(NamedTuple, Generic[A, S]):
    """``prepared``: what the artifact became so that it can be served."""

    artifact: A
    prepared: S


class VersionRegistry(Generic[A, S]):
    """Each model's newest version that is not withheld is served. A version that ``roll_back`` pinned is served in its
    place, across restarts and whatever is published meanwhile, until another is pinned or none (version 0)."""

    def __init__(
        self,
        store: VersionStore[A],
        prepare: Callable[[A], Awaitable[S]],
        metric: ServedVersions,
        *,
        now_ms: Callable[[], int] = lambda: round(time.time() * 1000),
    ) -> None:
        """``prepare``: makes a version ready to be served; raises Damaged."""
        self._store = store
        self._prepare = prepare
        self._metric = metric
        self._now_ms = now_ms
        self._turn = asyncio.Lock()
        """The store does one thing at a time."""
        self._unshown: list[A] = []
        self._serving: dict[str, Serving[A, S]] = {}

    # -- its life --------------------------------------------------------------------------------------------------

    async def open(self) -> list[A]:
        """The newest version of each model that can be read. Nothing is served before ``show``. Raises
        InvalidConfig."""
        async with self._turn:
            self._unshown = await in_thread(self._store.open)
            return list(self._unshown)

    async def show(self) -> None:
        """Serve what was kept."""
        async with self._turn:
            unshown, self._unshown = self._unshown, []
            for newest in unshown:
                await self._show(newest)

    async def close(self) -> None:
        async with self._turn:
            await in_thread(self._store.close)

    # -- asked by others -------------------------------------------------------------------------------------------

    def served(self, model: str) -> Serving[A, S] | None:
        return self._serving.get(model)

    def knows(self, model: str) -> bool:
        """Whether any version is kept. Does not block."""
        return bool(self._store.versions(model))

    def artifacts(self, model: str) -> tuple[list[ArtifactInfo], int]:
        """What is kept, oldest first, and the version that is served; 0: none."""
        served = self._serving.get(model)
        return self._store.versions(model), 0 if served is None else served.artifact.version

    async def read(self, model: str, version: int) -> tuple[ArtifactInfo, bytes]:
        """The file of ``version``; 0: of the one that is served. Raises NotKept."""
        async with self._turn:
            infos, serving = self.artifacts(model)
            which = version or serving
            data = await in_thread(self._store.read, model, which)
            return next(info for info in infos if info.version == which), data

    async def publish(self, artifact: A) -> ArtifactInfo:
        """Keep ``artifact`` as the next version of its model, and serve it unless it is withheld or another is pinned.
        Raises OSError, Damaged; then nothing has changed."""
        async with self._turn:
            artifact = replace(
                artifact, version=self._store.next_version(artifact.model), created_ms=self._now_ms()
            )  # fmt: skip
            prepared = await self._prepare(artifact)
            info = await in_thread(self._store.write, artifact)
            if self._store.pinned(artifact.model) is None and not info.withheld:
                self._serve(artifact, prepared)
            return info

    async def roll_back(self, model: str, version: int) -> ArtifactInfo:
        """Serve ``version`` from now on, a withheld one too; 0: the newest that is not withheld, and each one that
        becomes it. Raises NotKept, OSError."""
        async with self._turn:
            kept = self._store.versions(model)
            if not kept:
                raise NotKept(f"nothing is kept of the model {model!r:.100}")
            which = version or next((info.version for info in reversed(kept) if not info.withheld), 0)
            if not which:
                raise NotKept(
                    f"every version of the model {model!r:.100} is withheld; name the one to serve all the same"
                )
            artifact, prepared = await self._load(model, which)
            await in_thread(self._store.pin, model, version or None)
            self._serve(artifact, prepared)
            _LOG.warning("%r: version %d is served now%s", model, which, "" if version else ", and those after it")
            return next(info for info in self._store.versions(model) if info.version == which)

    async def forget(self, model: str) -> None:
        """Delete all versions of ``model``; none is served any more. Raises OSError."""
        async with self._turn:
            await in_thread(self._store.forget, model)
            self._unshown = [one for one in self._unshown if one.model != model]
            if self._serving.pop(model, None) is not None:
                self._metric.remove(model)

    # -- with the turn taken ---------------------------------------------------------------------------------------

    def _serve(self, artifact: A, prepared: S) -> None:
        self._serving[artifact.model] = Serving(artifact, prepared)
        self._metric.set(artifact.model, artifact.version)

    async def _show(self, newest: A) -> None:
        """Serve what was pinned, else the newest that is not withheld and can be served, if any."""
        model, pinned = newest.model, self._store.pinned(newest.model)
        servable = [info.version for info in reversed(self._store.versions(model)) if not info.withheld]
        for version in servable if pinned is None else [pinned, *servable]:
            try:
                if version == newest.version:
                    self._serve(newest, await self._prepare(newest))
                else:
                    self._serve(*await self._load(model, version))
                return
            except (NotKept, Damaged) as error:
                _LOG.warning("%r: version %d can not be served, the next that can is: %s", model, version, error)
        _LOG.info("%r: none of what is kept is served", model)

    async def _load(self, model: str, version: int) -> tuple[A, S]:
        """Raises NotKept."""
        try:
            artifact = await in_thread(lambda: self._store.codec.load(self._store.read(model, version)))
            return artifact, await self._prepare(artifact)
        except Damaged as error:
            raise NotKept(f"version {version} of the model {model!r:.100} can not be read: {error}") from error


async def in_thread(call: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """What ``call`` returns. A call that is cancelled does not return before its thread has ended, so that a lock
    which is held around it stays taken until then."""
    task = asyncio.ensure_future(asyncio.to_thread(call, *arguments, **named))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            _LOG.warning("a call that was cancelled failed: %s", task.exception())
        raise
