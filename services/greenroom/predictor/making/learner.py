"""Learns predictors beside the statistics, in processes of their own, and forecasts from what came of it."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged
from greenroom.predictor.judging.gate import why_withheld
from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact
from greenroom.predictor.kinds.emoe.config import LEARNED_KINDS, LEAST_SEQUENCES, LearningConfig, TrainingConfig
from greenroom.predictor.kinds.emoe.jobs import TRAINER, train_apart
from greenroom.predictor.kinds.emoe.samples import Sample
from greenroom.predictor.kinds.emoe.versions import LEARNED, LearnedShelf
from greenroom.predictor.kinds.statistics.forecaster import parse_previous
from greenroom.predictor.making.demand import Demand
from greenroom.predictor.making.subprocess_job import ApartFailed
from greenroom.predictor.making.workspace import remove_abandoned
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.serving.bounded_thread import Crowded, Waiting
from greenroom.predictor.traces.counts import Floats, Shape
from greenroom.predictor.traces.recent_sequences import Ring
from greenroom.predictor.versions.store import FileVersions, MemoryVersions, Versions

_LOG = logging.getLogger(__name__)
_NEEDED = ("torch", "transformers")
_SHARE_OF_WHO_ASKS = 0.5
"""Of the time that is left to it, for a learned forecast; the rest is for statistics to answer, and the way back."""


class Learner:
    """Sequences come by ``take``; when a model has enough of them, and again when so many more have come, each kind
    that is wanted of it is trained, one at a time. Whatever goes wrong with a training is counted and logged, and what
    was served before goes on being served; so it does where what came of it is worse (``learned.gate``).

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
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``command``: the trainer. Raises InvalidConfig where kinds are to be learnt and torch is not installed."""
        self._config = config
        self._metrics = metrics
        self._command = command
        self._now = now
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        if missing and config.kinds:
            allowed = f"{missing[0]} is not installed; install greenroom[torch], or learn none"
            raise InvalidConfig("learn", ",".join(config.kinds), allowed)
        self._off = config.off or bool(missing)
        self._executor = None if self._off else ThreadPoolExecutor(1, thread_name_prefix="learned")
        self.shelves: Mapping[str, LearnedShelf] = {
            kind: LearnedShelf(kind, _store(state_dir, keep, kind), metrics, self._executor) for kind in LEARNED_KINDS
        }
        self.ring: Ring[str, Sample] = Ring(config.max_bytes, config.max_sequences)
        self._arrived: dict[str, int] = {}
        self._asked = Demand(config.asked_within_s)
        self._tried: dict[tuple[str, str], int] = {}
        """How many sequences of the model had come when it was last tried."""
        self._learnt: dict[tuple[str, str], int] = {}
        """How many sequences of the model had come when what is served of it, or was, was learnt."""
        self._too_large: set[str] = set()
        """Models that were said to be."""
        self._wake = asyncio.Event()
        self._waiting = None if self._executor is None else Waiting(self._executor, config.max_waiting)

    @property
    def wants_samples(self) -> bool:
        return not self._off

    # -- its life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Raises InvalidConfig."""
        for shelf in self.shelves.values():
            await shelf.open()
        if not self._off:
            for folder in await asyncio.to_thread(remove_abandoned):
                _LOG.warning("%s was left by a predictor that was killed, and is removed", folder)

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
            if sample.counts.nbytes > self._config.max_bytes:
                self._say_too_large(model, sample.counts.nbytes)
            return
        self._arrived[model] = self._arrived.get(model, 0) + 1
        self._metrics.learning_from(len(self.ring), self.ring.nbytes)
        if self.ring.is_full(model) and self.ring.count(model) < LEAST_SEQUENCES:
            self._say_too_large(model, sample.counts.nbytes)
        self._wake.set()

    def _say_too_large(self, model: str, nbytes: int) -> None:
        """Once."""
        if model not in self._too_large:
            self._too_large.add(model)
            _LOG.warning(
                "nothing can be learnt of %r: one of its sequences takes %d bytes, at least %d are needed, and the "
                "memory to learn from has %d, for all models; give it more",
                model, nbytes, LEAST_SEQUENCES, self._config.max_bytes,
            )  # fmt: skip

    async def forget(self, model: str) -> None:
        """Raises OSError."""
        self.ring.forget(model)
        self._arrived.pop(model, None)
        self._too_large.discard(model)
        for kind, shelf in self.shelves.items():
            self._tried.pop((model, kind), None)
            self._learnt.pop((model, kind), None)
            self._asked.forget((model, kind))
            await shelf.forget(model)

    def _due(self) -> Iterator[tuple[str, str]]:
        now = self._now()
        for model, kind in self._asked.lapse(now):
            _LOG.info("nobody asked for %s of %r in %g s: it is learnt again when someone does",
                      kind, model, self._config.asked_within_s)  # fmt: skip
        for model in self.ring:
            for kind in LEARNED_KINDS:
                if kind in self._config.kinds or self._asked.holds((model, kind), now):
                    tried = self._tried.get((model, kind), 0 if self.shelves[kind].knows(model) else None)
                    new = self._arrived[model] - (tried or 0)
                    if self._has_enough(model) and (tried is None or new >= self._config.again):
                        yield model, kind

    def _has_enough(self, model: str) -> bool:
        """Or as many as there is room for."""
        count = self.ring.count(model)
        return count >= self._config.after or (self.ring.is_full(model) and count >= LEAST_SEQUENCES)

    async def _learn(self, model: str, kind: str) -> None:
        samples = self.ring.sequences(model)
        if not samples:  # forgotten meanwhile
            return
        if len(samples) < self._config.after:
            _LOG.warning("%s of %r is learnt from %d sequences instead of %d: the memory to learn from holds no more; "
                         "give it more", kind, model, len(samples), self._config.after)  # fmt: skip
        arrived = self._tried[model, kind] = self._arrived[model]
        config = TrainingConfig(kind=kind, backbone=self._config.backbone, seed=self._config.seed)
        began = time.monotonic()
        try:
            artifact = await train_apart(
                model,
                samples,
                config,
                timeout_s=self._config.timeout_s,
                command=self._command,
                served=self._comparable(model, kind, round(len(samples) * config.test_share)),
            )
            if (model, kind) not in self._tried:
                return  # forgotten meanwhile
            artifact = artifact.withheld_for(why_withheld(artifact.report, self._config.tolerance))
            info = await self.shelves[kind].publish(artifact)
        except (ApartFailed, OSError, Damaged) as error:
            why = error.why if isinstance(error, ApartFailed) else "failed"
            self._metrics.trained(kind, why)
            if (model, kind) in self._tried:
                self._tried[model, kind] -= max(0, self._config.again - self._config.after)
            _LOG.error("%s of %r was not learnt; it is tried again when %d more sequences have come: %s",
                       kind, model, min(self._config.after, self._config.again), error)  # fmt: skip
            return
        self._metrics.training.observe(time.monotonic() - began)
        if info.withheld:
            self._metrics.trained(kind, "withheld")
            _LOG.warning("%s of %r: version %d is kept and not served: %s", kind, model, info.version, info.withheld)
            return
        self._metrics.trained(kind, "published")
        self._learnt[model, kind] = arrived
        _LOG.info("%s of %r: version %d, learnt from %d sequences in %.1f s, overlap %.3f on %d others",
                  kind, model, info.version, info.sequences, time.monotonic() - began,
                  artifact.report.get("overlap", float("nan")), artifact.report.get("test_sequences", 0))  # fmt: skip

    def _comparable(self, model: str, kind: str, test: int) -> LearnedArtifact | None:
        """What is served, where it has seen none of the last ``test`` sequences, which the next one is measured on:
        what it learnt from by heart would make it look better than it is."""
        new = self._arrived[model] - self._learnt.get((model, kind), 0)
        return self.shelves[kind].served(model) if new >= test else None

    # -- forecasts -----------------------------------------------------------------------------------------------

    async def forecast(
        self,
        model: str,
        task_type: str,
        previous: bytes,
        kind: str,
        shape: Shape | None,
        within_s: float = math.inf,
    ) -> tuple[LearnedArtifact, Floats] | None:
        """None where it is not served, fails, or is not made in the time that the configuration gives it and who asks
        has left (``within_s``). ``shape``: the model's, if it is known otherwise; what was learnt of another shape is
        not used. Raises InvalidRequest."""
        wanted = self._config.when_asked and not self._off and model in self._arrived
        if wanted and self._asked.ask((model, kind), self._now()):
            self._wake.set()
        shelf = self.shelves[kind]
        artifact = shelf.served(model)
        if self._waiting is None or artifact is None or (shape is not None and artifact.shape != shape):
            return None
        work = shelf.forecast(model, task_type, parse_previous(previous, artifact.shape) if previous else None)
        try:
            found = await self._waiting.call(min(self._config.forecast_s, _SHARE_OF_WHO_ASKS * within_s), work)
        except Crowded:
            self._metrics.forgone(kind, "crowded")
        except TimeoutError:
            self._metrics.forgone(kind, "late")
        except Exception:  # whatever torch raises: statistics are there, and who asks is told what answered
            self._metrics.forgone(kind, "failed")
            _LOG.exception("version %d of %s of %r made no forecast", artifact.version, kind, model)
        else:
            if np.isfinite(found).all():
                return artifact, found
            self._metrics.forgone(kind, "failed")
            _LOG.error("version %d of %s of %r forecast what are no numbers", artifact.version, kind, model)
        return None


def _store(state_dir: Path | None, keep: int, kind: str) -> Versions[LearnedArtifact]:
    if state_dir is None:
        return MemoryVersions(keep, LEARNED)
    return FileVersions(state_dir, keep, LEARNED, within=kind)
