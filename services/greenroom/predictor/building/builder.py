"""Makes the artifacts of expert policies from live traces, in processes of their own, and keeps their versions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Trace
from greenroom.policies.moe_infinity.policy import RECALL
from greenroom.predictor.apart import ApartFailed
from greenroom.predictor.building.config import BUILT_KINDS, BuildingConfig
from greenroom.predictor.building.jobs import BUILDER, Job, build_apart
from greenroom.predictor.building.kinds import KINDS, Kept
from greenroom.predictor.building.pace import Pace, Retry
from greenroom.predictor.building.shelf import BuiltShelf, shelf_of
from greenroom.predictor.counts import Shape, shape_of
from greenroom.predictor.learned.demand import Demand
from greenroom.predictor.learned.samples import Picks
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.ring import Ring
from greenroom.predictor.workspace import remove_abandoned

_LOG = logging.getLogger(__name__)
_MOST_ASKED = 1024
"""Models and kinds that are remembered to have been asked for."""


@dataclass(slots=True, eq=False)
class _Watched:
    """One model and kind. ``inherited``: what was served of it when this process began; it goes on standing for
    sequences that are not here, which what is built from now on does not: it is made of those that are."""

    shape: Shape
    pace: Pace
    retry: Retry
    inherited: ArtifactFile | None


class Builder:
    """Workers ask for kinds, by ``asked``; from then on what a build needs of a model's sequences is kept, by ``keep``
    and ``take``. When its pace says so a kind is built, one at a time. What goes wrong with a build is counted, logged
    and tried again; what was served goes on being served. Sequences are in memory only, versions are kept."""

    def __init__(
        self,
        config: BuildingConfig,
        metrics: PredictorMetrics,
        *,
        state_dir: Path | None,
        keep: int,
        command: Sequence[str] = BUILDER,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``command``: what builds. Raises InvalidConfig where a kind that is always to be built lacks a module."""
        self._config = config
        self._metrics = metrics
        self._command = command
        self._now = now
        self._lacking = {kind: module for kind in BUILT_KINDS if (module := KINDS[kind].lacking) is not None}
        for kind in config.kinds:
            if kind in self._lacking:
                allowed = f"{self._lacking[kind]} is not installed: pip install 'greenroom[{kind}]', or build none"
                raise InvalidConfig("build", kind, allowed)
        self.shelves: Mapping[str, BuiltShelf] = {
            kind: shelf_of(kind, state_dir, keep, metrics) for kind in BUILT_KINDS
        }  # fmt: skip
        self._ring: Ring[tuple[str, str, bool], Kept] = Ring(config.max_bytes, config.max_sequences)
        """By model, kind, and whether they were recorded apart."""
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._asked = Demand(config.asked_within_s)
        self._wake = asyncio.Event()

    # -- its life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Serve what was kept. Raises InvalidConfig."""
        for shelf in self.shelves.values():
            await shelf.open()
        if not self._config.off:
            for folder in await asyncio.to_thread(remove_abandoned):
                _LOG.warning("%s was left by a predictor that was killed, and is removed", folder)

    async def run(self) -> None:
        """Until it is cancelled; a build that is under way is then killed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_retry()):
                    await self._wake.wait()
            self._wake.clear()
            for model, kind in tuple(self._due()):
                await self._build(model, kind)

    async def close(self) -> None:
        for shelf in self.shelves.values():
            await shelf.close()

    # -- asked by others -----------------------------------------------------------------------------------------

    def asked(self, model: str, kind: str) -> None:
        """Somebody wants artifacts of this kind."""
        which, now = (model, kind), self._now()
        if not self._config.when_asked or kind not in KINDS:
            return
        if len(self._asked) >= _MOST_ASKED and not self._asked.holds(which, now):
            self._asked.lapse(now)
            if len(self._asked) >= _MOST_ASKED:
                return
        if self._asked.ask(which, now):
            if kind in self._lacking:
                _LOG.warning("%s of %r is asked for and can not be made: %s is not installed: pip install "
                             "'greenroom[%s]'", kind, model, self._lacking[kind], kind)  # fmt: skip
            self._wake.set()

    def wants(self, model: str) -> tuple[str, ...]:
        """The kinds that something is to be kept for of the model's sequences."""
        now = self._now()
        return tuple(
            kind
            for kind in BUILT_KINDS
            if kind in self._config.kinds or (kind not in self._lacking and self._asked.holds((model, kind), now))
        )

    async def forget(self, model: str) -> None:
        """Raises OSError."""
        for kind, shelf in self.shelves.items():
            self._watched.pop((model, kind), None)
            for apart in (False, True):
                self._ring.forget((model, kind, apart))
            await shelf.forget(model)

    # -- sequences -----------------------------------------------------------------------------------------------

    def take(self, trace: Trace, kept: Mapping[str, Kept | None]) -> None:
        """One more sequence, counted once. ``kept``: by kind, of ``wants``, what ``keep`` made of it."""
        recall = recall_of(trace)
        for kind, sample in kept.items():
            if sample is None:
                self._metrics.unbuildable.inc()
                continue
            watched = self._watch(trace, kind)
            apart = watched.pace.note(None if self._is_by_another(trace, kind) else recall)
            self._metrics.recorded(kind, apart)
            if not self._ring.add((trace.model, kind, apart), sample):
                self._metrics.unbuildable.inc()
            if watched.pace.due:
                self._wake.set()
        self._metrics.building_from(len(self._ring), self._ring.nbytes)

    def _is_by_another(self, trace: Trace, kind: str) -> bool:
        """Whether its worker says that it predicted by another version than is served: it has not swapped yet."""
        served, used = self.shelves[kind].served(trace.model), trace.artifacts.get(kind)
        return served is not None and used is not None and used != served.created_ms

    def _watch(self, trace: Trace, kind: str) -> _Watched:
        watched = self._watched.get((trace.model, kind))
        if watched is None:
            made = self.shelves[kind].knows(trace.model)
            retry = Retry(self._config.retry_s, self._config.max_retry_s)
            inherited = self.shelves[kind].served(trace.model)
            watched = _Watched(shape_of(trace), KINDS[kind].pace(self._config, made), retry, inherited)
            self._watched[trace.model, kind] = watched
        return watched

    # -- building ------------------------------------------------------------------------------------------------

    def _due(self) -> Iterator[tuple[str, str]]:
        now = self._now()
        for model, kind in self._asked.lapse(now):
            _LOG.info("nobody asked for %s of %r in %g s: it is made again when someone does",
                      kind, model, self._config.asked_within_s)  # fmt: skip
        for (model, kind), watched in self._watched.items():
            if watched.pace.due and watched.retry.not_before <= now and kind in self.wants(model):
                yield model, kind

    def _until_retry(self) -> float | None:
        """Seconds until one that failed may be tried again; None: there is none."""
        now = self._now()
        soonest = min((one.retry.not_before for one in self._watched.values() if one.pace.due), default=math.inf)
        return max(0.0, soonest - now) if now < soonest < math.inf else None

    async def _build(self, model: str, kind: str) -> None:
        watched = self._watched.get((model, kind))
        if watched is None:  # forgotten meanwhile
            return
        recorded = self._ring.sequences((model, kind, True))
        kept = [*self._ring.sequences((model, kind, False)), *recorded]
        if not kept:
            watched.retry.failed(self._now())
            _LOG.warning("%s of %r is not made: the memory for its sequences holds none", kind, model)
            return
        options = KINDS[kind].options(self._config)
        job = Job(kind, model, watched.shape, kept, options, watched.inherited, len(recorded))
        began = time.monotonic()
        try:
            file = await build_apart(job, timeout_s=self._config.timeout_s, command=self._command)
            if self._watched.get((model, kind)) is not watched:  # forgotten meanwhile
                return
            info = await self.shelves[kind].publish(file)
        except (ApartFailed, OSError) as error:
            self._metrics.built(kind, error.why if isinstance(error, ApartFailed) else "failed")
            pause_s = watched.retry.failed(self._now())
            _LOG.error("%s of %r was not made; it is tried again in %g s: %s", kind, model, pause_s, error)
            return
        seconds = time.monotonic() - began
        watched.pace.built()
        watched.retry.succeeded()
        for sample in self._ring.sequences((model, kind, True)):  # they are among the others from now on
            self._ring.add((model, kind, False), sample)
        self._ring.forget((model, kind, True))
        self._metrics.built(kind, "published")
        self._metrics.building.observe(seconds)
        _LOG.info("%s of %r: version %d, made of %d sequences in %.1f s",
                  kind, model, info.version, info.sequences, seconds)  # fmt: skip


def keep(kinds: Sequence[str], picks: Picks, experts: int) -> dict[str, Kept | None]:
    """By kind, what is kept of a sequence of ``picks[rows, layers, k]``. In any thread."""
    return {kind: KINDS[kind].keep(picks, experts) for kind in kinds}


def recall_of(trace: Trace) -> float | None:
    """What its worker says of how well it was foreseen, 0 to 1; None where it does not, or nothing that can be."""
    recall = trace.report.get(RECALL)
    return recall if recall is not None and 0 <= recall <= 1 else None
