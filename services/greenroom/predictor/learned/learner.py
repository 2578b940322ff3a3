"""Learns predictors beside the statistics, in processes of their own, and forecasts from what came of it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from greenroom.core.errors import InvalidConfig
from greenroom.predictor.counts import Floats, Shape
from greenroom.predictor.forecast import parse_previous
from greenroom.predictor.learned.artifact import LearnedArtifact
from greenroom.predictor.learned.config import LEARNED_KINDS, LearningConfig, TrainingConfig
from greenroom.predictor.learned.jobs import TRAINER, TrainingFailed, train_apart
from greenroom.predictor.learned.samples import Sample, SampleRing
from greenroom.predictor.learned.shelf import LEARNED, LearnedShelf
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.store import FileVersions, MemoryVersions, Versions
from greenroom.predictor.tensors import Damaged

_LOG = logging.getLogger(__name__)
_NEEDED = ("torch", "transformers")


class Learner:
    """Sequences come by ``take``; when a model has enough of them, and again when so many more have come, each kind
    that is wanted of it is trained, one at a time. Whatever goes wrong with a training is counted and logged, and what
    was served before goes on being served.

    After a restart what was kept is served; it is learnt anew when ``again`` sequences have come, not ``after``: what
    was learnt from many does not give way to what was learnt from few.
    """

    def __init__(
        self,
        config: LearningConfig,
        metrics: PredictorMetrics,
        *,
        state_dir: Path | None,
        keep: int,
        command: Sequence[str] = TRAINER,
    ) -> None:
        """``command``: the trainer. Raises InvalidConfig where kinds are to be learnt and torch is not installed."""
        self._config = config
        self._metrics = metrics
        self._command = command
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing and config.kinds:
            allowed = f"{missing[0]} is not installed; install greenroom[torch], or learn none"
            raise InvalidConfig("learn", ",".join(config.kinds), allowed)
        self._off = config.off or bool(missing)
        self._executor = None if self._off else ThreadPoolExecutor(1, thread_name_prefix="learned")
        self.shelves: Mapping[str, LearnedShelf] = {
            kind: LearnedShelf(kind, _store(state_dir, keep, kind), metrics, self._executor) for kind in LEARNED_KINDS
        }
        self.ring = SampleRing(config.max_bytes, config.max_sequences)
        self._arrived: dict[str, int] = {}
        self._asked: set[tuple[str, str]] = set()
        self._tried: dict[tuple[str, str], int] = {}
        """How many sequences of the model had come when it was last tried."""
        self._wake = asyncio.Event()
        self._waiting = 0

    @property
    def wants_samples(self) -> bool:
        return not self._off

    # -- its life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Raises InvalidConfig."""
        for shelf in self.shelves.values():
            await shelf.open()

    async def run(self) -> None:
        """Until it is cancelled; a training that is under way is then killed."""
        for shelf in self.shelves.values():
            await shelf.show()
        while True:
            await self._wake.wait()
            self._wake.clear()
            for model, kind in tuple(self._due()):
                await self._learn(model, kind)

    async def close(self) -> None:
        for shelf in self.shelves.values():
            await shelf.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    # -- learning ------------------------------------------------------------------------------------------------

    def take(self, model: str, sample: Sample) -> None:
        """One more sequence, counted once."""
        if self._off:
            return
        if not self.ring.add(model, sample):
            self._metrics.unlearnable.inc()
            return
        self._arrived[model] = self._arrived.get(model, 0) + 1
        self._metrics.learning_from(len(self.ring), self.ring.nbytes)
        self._wake.set()

    async def forget(self, model: str) -> None:
        """Raises OSError."""
        self.ring.forget(model)
        self._arrived.pop(model, None)
        for kind, shelf in self.shelves.items():
            self._tried.pop((model, kind), None)
            self._asked.discard((model, kind))
            await shelf.forget(model)

    def _due(self) -> Iterator[tuple[str, str]]:
        for model in self.ring:
            for kind in LEARNED_KINDS:
                if kind in self._config.kinds or (model, kind) in self._asked:
                    tried = self._tried.get((model, kind), 0 if self.shelves[kind].knows(model) else None)
                    new = self._arrived[model] - (tried or 0)
                    enough = self.ring.count(model) >= self._config.after
                    if enough and (tried is None or new >= self._config.again):
                        yield model, kind

    async def _learn(self, model: str, kind: str) -> None:
        samples = self.ring.sequences(model)
        if not samples:  # forgotten meanwhile
            return
        self._tried[model, kind] = self._arrived[model]
        config = TrainingConfig(kind=kind, backbone=self._config.backbone, seed=self._config.seed)
        began = time.monotonic()
        try:
            artifact = await train_apart(
                model, samples, config, timeout_s=self._config.timeout_s, command=self._command
            )  # fmt: skip
            if (model, kind) not in self._tried:
                return  # forgotten meanwhile
            info = await self.shelves[kind].publish(artifact)
        except (TrainingFailed, OSError, Damaged) as error:
            why = error.why if isinstance(error, TrainingFailed) else "failed"
            self._metrics.trained(kind, why)
            if (model, kind) in self._tried:
                self._tried[model, kind] -= max(0, self._config.again - self._config.after)
            _LOG.error("%s of %r was not learnt; it is tried again when %d more sequences have come: %s",
                       kind, model, min(self._config.after, self._config.again), error)  # fmt: skip
            return
        self._metrics.trained(kind, "published")
        self._metrics.training.observe(time.monotonic() - began)
        _LOG.info("%s of %r: version %d, learnt from %d sequences in %.1f s, overlap %.3f on %d others",
                  kind, model, info.version, info.sequences, time.monotonic() - began,
                  artifact.report.get("overlap", float("nan")), artifact.report.get("test_sequences", 0))  # fmt: skip

    # -- forecasts -----------------------------------------------------------------------------------------------

    async def forecast(
        self, model: str, task_type: str, previous: bytes, kind: str, shape: Shape | None
    ) -> tuple[LearnedArtifact, Floats] | None:
        """None where it is not served, or too many wait for it already. ``shape``: the model's, if it is known
        otherwise; what was learnt of another shape is not used. Raises InvalidRequest."""
        if self._config.when_asked and not self._off and (model, kind) not in self._asked and model in self._arrived:
            self._asked.add((model, kind))
            self._wake.set()
        artifact = self.shelves[kind].served(model)
        if artifact is None or (shape is not None and artifact.shape != shape):
            return None
        given = parse_previous(previous, artifact.shape) if previous else None
        if self._waiting >= self._config.max_waiting:
            return None
        self._waiting += 1
        try:
            return await self.shelves[kind].forecast(model, task_type, given)
        finally:
            self._waiting -= 1


def _store(state_dir: Path | None, keep: int, kind: str) -> Versions[LearnedArtifact]:
    if state_dir is None:
        return MemoryVersions(keep, LEARNED)
    return FileVersions(state_dir, keep, LEARNED, within=kind)
