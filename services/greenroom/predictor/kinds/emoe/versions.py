"""What was learnt of one kind: kept, served, rolled back. Forecasts are made on one thread of its owner's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact, dump_learned, load_learned
from greenroom.predictor.kinds.statistics.snapshot import ArtifactInfo
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.traces.counts import Floats
from greenroom.predictor.versions.registry import Shelf
from greenroom.predictor.versions.store import Codec, Versions

if TYPE_CHECKING:
    from greenroom.predictor.kinds.emoe.networks import LearnedPredictor

_LOG = logging.getLogger(__name__)
LEARNED = Codec(dump_learned, load_learned)


class LearnedShelf(Shelf[LearnedArtifact, "LearnedPredictor"]):
    """``executor``: one thread, where predictors are made and asked, since torch takes its time; None: what is kept is
    listed and handed out, and never served."""

    def __init__(
        self,
        kind: str,
        store: Versions[LearnedArtifact],
        metrics: PredictorMetrics,
        executor: Executor | None,
        *,
        now_ms: Callable[[], int] = lambda: round(time.time() * 1000),
    ) -> None:
        super().__init__(store)
        self.kind = kind
        self._metrics = metrics
        self._executor = executor
        self._now_ms = now_ms
        self._newest: list[LearnedArtifact] = []
        self._served: dict[str, LearnedPredictor] = {}

    async def open(self) -> None:
        """Raises InvalidConfig. Nothing is served before ``show``."""
        async with self._turn:
            self._newest = await self._blocking(self._store.open)

    async def show(self) -> None:
        """Serve what was kept."""
        async with self._turn:
            waiting, self._newest = self._newest, []
            if self._executor is None:
                return
            for artifact in waiting:
                await self._show(artifact)

    async def publish(self, artifact: LearnedArtifact) -> ArtifactInfo:
        """As its model's next version, which is served unless it is withheld or another pinned. Raises OSError,
        Damaged; then nothing has changed."""
        async with self._turn:
            return await self._publish(artifact.as_version(self._store.next_version(artifact.model), self._now_ms()))

    def knows(self, model: str) -> bool:
        """Whether any version is kept. Does not block."""
        return bool(self._store.versions(model))

    def served(self, model: str) -> LearnedArtifact | None:
        predictor = self._served.get(model)
        return None if predictor is None else predictor.artifact

    def forecast(self, model: str, task_type: str, previous: Floats | None) -> Callable[[], Floats]:
        """From what is ``served`` now; to be called on the executor's thread."""
        return partial(self._served[model].forecast, task_type, previous)

    def serving(self, model: str) -> int:
        artifact = self.served(model)
        return 0 if artifact is None else artifact.version

    async def _prepare(self, artifact: LearnedArtifact) -> LearnedPredictor:
        if self._executor is None:
            raise Damaged("learned predictors are off, or torch is not installed: nothing can be served of it")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, _predictor, artifact)
        except Exception as error:  # torch may be there and not work: what is kept must not end the service
            raise Damaged(f"it can not be loaded: {error!r:.200}") from error

    def _serve(self, artifact: LearnedArtifact, prepared: LearnedPredictor) -> None:
        self._served[artifact.model] = prepared
        self._metrics.serving_learned(artifact.model, self.kind, artifact.version)

    def _withdraw(self, model: str) -> None:
        self._newest = [one for one in self._newest if one.model != model]
        if self._served.pop(model, None) is not None:
            self._metrics.not_serving_learned(model, self.kind)


def _predictor(artifact: LearnedArtifact) -> LearnedPredictor:
    from greenroom.predictor.kinds.emoe.networks import LearnedPredictor

    predictor = LearnedPredictor(artifact)
    if not np.isfinite(predictor.forecast("", None)).all():  # the first one takes longest, too
        raise Damaged("what it forecasts are no numbers")
    return predictor
