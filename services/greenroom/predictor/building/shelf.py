"""What was built of one kind: kept, handed out to workers, rolled back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.predictor.building.kinds import KINDS
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.shelf import Shelf
from greenroom.predictor.snapshot import ArtifactInfo
from greenroom.predictor.store import Codec, FileVersions, MemoryVersions, Versions


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An artifact's file as versions are kept of it."""

    file: ArtifactFile

    @property
    def model(self) -> str:
        return self.file.model

    @property
    def version(self) -> int:
        return self.file.version

    @property
    def info(self) -> ArtifactInfo:
        file = self.file
        return ArtifactInfo(file.version, file.model, file.created_ms, file.sequences, kind=file.KIND)


class BuiltShelf(Shelf[Built, Built]):
    """Of one kind. What is served is what workers are given who ask for version 0."""

    def __init__(
        self,
        kind: str,
        store: Versions[Built],
        metrics: PredictorMetrics,
        *,
        now_ms: Callable[[], int] = lambda: round(time.time() * 1000),
    ) -> None:
        super().__init__(store)
        self.kind = kind
        self._metrics = metrics
        self._now_ms = now_ms
        self._served: dict[str, Built] = {}

    async def open(self) -> None:
        """Serve what was kept. Raises InvalidConfig."""
        async with self._turn:
            for newest in await self._blocking(self._store.open):
                await self._show(newest)

    async def publish(self, file: ArtifactFile) -> ArtifactInfo:
        """As its model's next version, which is served unless another is pinned. Raises OSError; then nothing has
        changed."""
        async with self._turn:
            version = self._store.next_version(file.model)
            return await self._publish(Built(replace(file, version=version, created_ms=self._now_ms())))

    def knows(self, model: str) -> bool:
        """Whether any version is kept. Does not block."""
        return bool(self._store.versions(model))

    def served(self, model: str) -> ArtifactFile | None:
        built = self._served.get(model)
        return None if built is None else built.file

    def serving(self, model: str) -> int:
        built = self._served.get(model)
        return 0 if built is None else built.version

    async def _prepare(self, artifact: Built) -> Built:
        return artifact

    def _serve(self, artifact: Built, prepared: Built) -> None:
        self._served[artifact.model] = prepared
        self._metrics.serving_built(artifact.model, self.kind, artifact.version)

    def _withdraw(self, model: str) -> None:
        if self._served.pop(model, None) is not None:
            self._metrics.not_serving_built(model, self.kind)


def shelf_of(kind: str, state_dir: Path | None, keep: int, metrics: PredictorMetrics) -> BuiltShelf:
    """``state_dir`` None: in memory."""
    file = KINDS[kind].file
    codec = Codec(lambda built: built.file.dump(), lambda data: Built(file.parse(data)))
    store: Versions[Built]
    store = MemoryVersions(keep, codec) if state_dir is None else FileVersions(state_dir, keep, codec, within=kind)
    return BuiltShelf(kind, store, metrics)
