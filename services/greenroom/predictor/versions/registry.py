"""Versions of one kind: what is kept, which is served, which is pinned."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.statistics.snapshot import ArtifactInfo
from greenroom.predictor.versions.store import A, NotKept, Versions

_LOG = logging.getLogger(__name__)
R = TypeVar("R")
S = TypeVar("S")


class Shelf(Generic[A, S]):
    """Each model's newest version that is not withheld is served, unless one was pinned by ``roll_back``: that one is,
    across restarts and whatever is published meanwhile, until another is pinned or none (version 0). ``S`` is what a
    version becomes when it is served."""

    def __init__(self, store: Versions[A]) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        """The store does one thing at a time."""

    # -- of one kind -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def _prepare(self, artifact: A) -> S:
        """Ready to be served. Raises Damaged."""

    @abstractmethod
    def _serve(self, artifact: A, prepared: S) -> None: ...

    @abstractmethod
    def _withdraw(self, model: str) -> None:
        """Serve nothing of it any more."""

    @abstractmethod
    def serving(self, model: str) -> int:
        """The version that is served; 0: none."""

    # -- asked by others -------------------------------------------------------------------------------------------

    async def close(self) -> None:
        async with self._turn:
            await self._blocking(self._store.close)

    async def forget(self, model: str) -> None:
        """All of what is kept and served of ``model``. Raises OSError."""
        async with self._turn:
            await self._blocking(self._store.forget, model)
            self._withdraw(model)

    def artifacts(self, model: str) -> tuple[list[ArtifactInfo], int]:
        """What is kept, oldest first, and the version that is served; 0: none."""
        return self._store.versions(model), self.serving(model)

    async def read(self, model: str, version: int) -> tuple[ArtifactInfo, bytes]:
        """The file of ``version``; 0: of the one that is served. Raises NotKept."""
        async with self._turn:
            infos, serving = self.artifacts(model)
            wanted = version or serving
            data = await self._blocking(self._store.read, model, wanted)
            return next(info for info in infos if info.version == wanted), data

    async def roll_back(self, model: str, version: int) -> ArtifactInfo:
        """Serve ``version`` from now on, a withheld one too; 0: the newest that is not, and whatever becomes it. Raises
        NotKept, OSError."""
        async with self._turn:
            kept = self._store.versions(model)
            if not kept:
                raise NotKept(f"nothing is kept of the model {model!r:.100}")
            wanted = version or next((info.version for info in reversed(kept) if not info.withheld), 0)
            if not wanted:
                raise NotKept(
                    f"every version of the model {model!r:.100} is withheld; name the one to serve all the same"
                )
            artifact, prepared = await self._load(model, wanted)
            await self._blocking(self._store.pin, model, version or None)
            self._serve(artifact, prepared)
            _LOG.warning("%r: version %d is served now%s", model, wanted, "" if version else ", and those after it")
            return next(info for info in self._store.versions(model) if info.version == wanted)

    # -- for one kind ----------------------------------------------------------------------------------------------

    async def _show(self, newest: A) -> None:
        """At the start: what was pinned, else the newest that is not withheld and can be served, if any."""
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
            artifact = await self._blocking(self._read, model, version)
            return artifact, await self._prepare(artifact)
        except Damaged as error:
            raise NotKept(f"version {version} of the model {model!r:.100} can not be read: {error}") from error

    def _read(self, model: str, version: int) -> A:
        return self._store.codec.load(self._store.read(model, version))

    async def _publish(self, artifact: A) -> ArtifactInfo:
        """Keep the next version of its model, and serve it unless it is withheld or another pinned. The turn is taken.
        Raises OSError, Damaged; then nothing has changed."""
        prepared = await self._prepare(artifact)
        info = await self._blocking(self._store.write, artifact)
        if self._store.pinned(artifact.model) is None and not info.withheld:
            self._serve(artifact, prepared)
        return info

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
