"""Makes kinds from live traces, in processes of their own, and keeps their versions."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Trace
from greenroom.core.tensors import Damaged
from greenroom.predictor.making.config import MakingConfig
from greenroom.predictor.making.demand import Demand
from greenroom.predictor.making.job import Job, dump_job
from greenroom.predictor.making.kind import ForecastKind, History, Kind, M, MadeArtifact, Predictor
from greenroom.predictor.making.pace import Pace, Retry
from greenroom.predictor.making.subprocess_job import JobFailed, run_job
from greenroom.predictor.making.workspace import remove_abandoned
from greenroom.predictor.metrics import MakingMetrics
from greenroom.predictor.traces.counts import Shape, shape_of
from greenroom.predictor.traces.reading import recall_of
from greenroom.predictor.traces.recent_sequences import RecentSequences
from greenroom.predictor.traces.samples import Sample
from greenroom.predictor.versions.artifact import ArtifactInfo
from greenroom.predictor.versions.registry import VersionRegistry
from greenroom.predictor.versions.store import store_of

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Watched:
    """One model and kind. ``inherited``: what was served when this process began. ``arrived``: sequences since then.
    ``served_from``: how many of them had arrived when what is served was begun."""

    shape: Shape
    pace: Pace
    retry: Retry
    inherited: MadeArtifact | None
    arrived: int = 0
    served_from: int = 0


class Maker:
    """Keeps what its kinds need of each model's sequences (``keeping``, ``take``). A kind that is always to be made, or
    was ``asked`` for, is made when its pace says so, one at a time.

    What goes wrong is counted, logged and tried again, and what was served goes on being served. So it does when the
    new version is withheld. Sequences are in memory only, versions are kept.
    """

    def __init__(
        self,
        kinds: Sequence[Kind[Any]],
        config: MakingConfig,
        metrics: MakingMetrics,
        *,
        state_dir: Path | None,
        keep: int,
        command: Sequence[str],
        executor: Executor | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``command``: what makes a job's artifact in a process of its own. ``executor``: of one thread, for kinds that
        forecasts are made from; None: none of those is served. Raises UnknownName, or InvalidConfig where a kind that
        is always to be made lacks a module."""
        self.kinds: Mapping[str, Kind[Any]] = {kind.name: kind for kind in kinds}
        config.check_kinds(self.kinds)
        self._config = config
        self._metrics = metrics
        self._command = command
        self._executor = executor
        self._now = now
        self._lacking = {kind.name: module for kind in kinds if (module := kind.lacking) is not None}
        for name in config.kinds:
            if name in self._lacking:
                raise InvalidConfig(config.WORD, name, f"{self._missing(name)}, or {config.WORD} none")
        self.registries: Mapping[str, VersionRegistry[Any, Predictor | None]] = {
            kind.name: VersionRegistry(
                store_of(kind.codec, state_dir, keep, within=kind.name), self._prepare(kind), metrics.served(kind.name)
            )
            for kind in kinds
        }
        self.recent: RecentSequences[tuple[str, str, bool]] = RecentSequences(config.max_bytes, config.max_sequences)
        """By model, ``Kind.keeps``, and whether they were recorded as foreseen badly."""
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._asked = Demand(config.asked_within_s)
        self._too_large: set[tuple[str, str]] = set()
        """Models and what is kept of them: those of which the log has said that too little fits."""
        self._tokenless: set[tuple[str, str]] = set()
        """Models and kinds of which the log has said that a sequence came without tokens."""
        self._wake = asyncio.Event()
        for kind in kinds:
            metrics.show(kind.name)

    # -- its life ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find what was kept, and serve the kinds that need not be loaded. Raises InvalidConfig."""
        for name, registry in self.registries.items():
            await registry.open()
            if not isinstance(self.kinds[name], ForecastKind):
                await registry.show()
        if not self._config.off:
            for folder in await asyncio.to_thread(remove_abandoned):
                _LOG.warning("%s was left by a predictor that was killed, and is removed", folder)

    async def run(self) -> None:
        """Until it is cancelled; a process that is under way is then killed."""
        for name, registry in self.registries.items():
            if isinstance(self.kinds[name], ForecastKind) and self._loads(name):
                await registry.show()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._until_retry()):
                    await self._wake.wait()
            self._wake.clear()
            for model, kind in tuple(self._due()):
                await self._make(model, kind)

    async def close(self) -> None:
        for registry in self.registries.values():
            await registry.close()

    def _loads(self, kind: str) -> bool:
        return self._executor is not None and kind not in self._lacking

    def _prepare(self, kind: Kind[Any]) -> Callable[[Any], Any]:
        async def load(artifact: Any) -> Predictor | None:
            if not isinstance(kind, ForecastKind):
                return None
            if not self._loads(kind.name):
                raise Damaged(f"{kind.name} is switched off, or a module that it needs is not installed")
            try:
                return await asyncio.get_running_loop().run_in_executor(self._executor, kind.load, artifact)
            except Exception as error:  # a library may be there and not work: the service goes on without it
                raise Damaged(f"it can not be loaded: {error!r:.200}") from error

        return load

    # -- asked by others -----------------------------------------------------------------------------------------

    def asked(self, model: str, kind: str) -> None:
        """A caller wants ``kind`` of ``model``.

        A kind whose sequences are kept anyway is not remembered before there are some: names that no trace has would
        take the room of others.
        """
        if not self._config.when_asked or kind not in self.kinds:
            return
        if self._keeps_unasked(self.kinds[kind]) and (model, kind) not in self._watched:
            return
        if self._asked.ask((model, kind), self._now()):
            if kind in self._lacking:
                _LOG.warning("%s of %r is asked for and can not be made: %s", kind, model, self._missing(kind))
            self._wake.set()

    def _missing(self, kind: str) -> str:
        return f"{self._lacking[kind]} is not installed: pip install 'greenroom[{self.kinds[kind].extra}]'"

    def keeping(self, model: str) -> list[Kind[Any]]:
        """The kinds that something is to be kept for of the model's sequences."""
        return [kind for kind in self.kinds.values() if self._is_wanted(model, kind) or self._keeps_unasked(kind)]

    def _keeps_unasked(self, kind: Kind[Any]) -> bool:
        return kind.keeps_unasked and self._config.when_asked and kind.name not in self._lacking

    def _is_wanted(self, model: str, kind: Kind[Any]) -> bool:
        asked = kind.name not in self._lacking and self._asked.holds((model, kind.name), self._now())
        return asked or kind.name in self._config.kinds

    async def forget(self, model: str) -> None:
        """Raises OSError."""
        for name, registry in self.registries.items():
            self._watched.pop((model, name), None)
            self._tokenless.discard((model, name))
            self._too_large.discard((model, self.kinds[name].keeps))
            for recorded in (False, True):
                self.recent.forget((model, self.kinds[name].keeps, recorded))
            await registry.forget(model)

    # -- sequences -----------------------------------------------------------------------------------------------

    def take(self, trace: Trace, kept: Mapping[str, Sample | None]) -> None:
        """One more sequence, counted once. ``kept``: what ``kept_of`` made of it."""
        for keeps, sample in kept.items():
            kinds = [kind for kind in self.kinds.values() if kind.keeps == keeps]
            if kinds:
                self._take(trace, keeps, kinds, sample)
        self._metrics.kept(len(self.recent), self.recent.nbytes)

    def _take(self, trace: Trace, keeps: str, kinds: Sequence[Kind[Any]], sample: Sample | None) -> None:
        if sample is None or not self.recent.fits((trace.model, keeps, False), sample):
            self._metrics.unusable.inc()
            if sample is not None and sample.nbytes > self._config.max_bytes:
                self._say_too_large(trace.model, keeps, sample.nbytes, kinds)
            if not trace.tokens:
                self._say_no_tokens(trace.model, kinds)
            return
        low = False
        for kind in kinds:
            watched = self._watch(trace, kind)
            watched.arrived += 1
            recorded = watched.pace.note(None if self._is_by_another(trace, kind) else recall_of(trace))
            self._metrics.took(kind.name, recorded)
            low |= recorded
            if watched.pace.due:
                self._wake.set()
        key = (trace.model, keeps, low)
        self.recent.add(key, sample)
        least = min(kind.least_sequences for kind in kinds)
        if self.recent.is_full(key) and self._count(trace.model, keeps) < least:
            self._say_too_large(trace.model, keeps, sample.nbytes, kinds)

    def _say_too_large(self, model: str, keeps: str, nbytes: int, kinds: Sequence[Kind[Any]]) -> None:
        """Once."""
        if (model, keeps) not in self._too_large:
            self._too_large.add((model, keeps))
            _LOG.warning(
                "nothing can be learnt of %r for %s: one of its sequences takes %d bytes, at least %d are needed, and "
                "the memory has %d bytes for all models; give it more",
                model, " or ".join(kind.name for kind in kinds), nbytes,
                min(kind.least_sequences for kind in kinds), self._config.max_bytes,
            )  # fmt: skip

    def _say_no_tokens(self, model: str, kinds: Sequence[Kind[Any]]) -> None:
        """Once."""
        for kind in kinds:
            if kind.keeps_tokens and (model, kind.name) not in self._tokenless:
                self._tokenless.add((model, kind.name))
                _LOG.warning("%s of %r is made of tokens, and some of its workers tell none: give them --trace-tokens",
                             kind.name, model)  # fmt: skip

    def _count(self, model: str, keeps: str) -> int:
        return self.recent.count((model, keeps, False)) + self.recent.count((model, keeps, True))

    def _is_by_another(self, trace: Trace, kind: Kind[Any]) -> bool:
        """Whether its worker predicted by another version than is served: the worker has not swapped yet."""
        served, used = self.registries[kind.name].served(trace.model), trace.artifacts.get(kind.name)
        return served is not None and used is not None and used != served.artifact.created_ms

    def _watch(self, trace: Trace, kind: Kind[Any]) -> _Watched:
        watched = self._watched.get((trace.model, kind.name))
        if watched is None:
            registry = self.registries[kind.name]
            served = registry.served(trace.model)
            watched = self._watched[trace.model, kind.name] = _Watched(
                shape_of(trace),
                kind.pace(registry.knows(trace.model)),
                Retry(self._config.retry_s, self._config.max_retry_s),
                None if served is None else served.artifact,
            )
        return watched

    # -- making ----------------------------------------------------------------------------------------------------

    def _due(self) -> Iterator[tuple[str, Kind[Any]]]:
        now = self._now()
        for model, name in self._asked.lapse(now):
            _LOG.info("nobody asked for %s of %r in %g s: it is made again when it is asked for",
                      name, model, self._config.asked_within_s)  # fmt: skip
        for (model, name), watched in self._watched.items():
            kind = self.kinds[name]
            due = watched.pace.due and watched.retry.not_before <= now
            if due and self._is_wanted(model, kind) and self._has_enough(model, kind):
                yield model, kind

    def _has_enough(self, model: str, kind: Kind[Any]) -> bool:
        """Or as many sequences as there is room for."""
        count, full = self._count(model, kind.keeps), self.recent.is_full((model, kind.keeps, False))
        return count >= kind.usual_sequences or (full and count >= kind.least_sequences)

    def _until_retry(self) -> float | None:
        """Seconds until one that failed may be tried again; None: there is none."""
        now = self._now()
        retries = [one.retry.not_before for one in self._watched.values() if one.pace.due]
        return min((when - now for when in retries if when > now), default=None)

    async def _make(self, model: str, kind: Kind[Any]) -> None:
        watched = self._watched.get((model, kind.name))
        recorded = self.recent.sequences((model, kind.keeps, True))
        samples = [*self.recent.sequences((model, kind.keeps, False)), *recorded]
        if watched is None or not samples:  # forgotten meanwhile
            return
        if len(samples) < kind.usual_sequences:
            _LOG.warning("%s of %r is made of %d sequences instead of %d: the memory holds no more; give it more",
                         kind.name, model, len(samples), kind.usual_sequences)  # fmt: skip
        began, arrived = time.monotonic(), watched.arrived
        watched.pace.begun()
        try:
            artifact = await self._artifact(model, kind, watched, samples, len(recorded))
            if self._watched.get((model, kind.name)) is not watched:  # forgotten meanwhile
                return
            info = await self.registries[kind.name].publish(kind.judged(artifact))
        except (JobFailed, OSError, Damaged) as error:
            self._failed(model, kind, watched, error)
            return
        watched.pace.made()
        watched.retry.succeeded()
        self._merge_recorded(model, kind.keeps)
        self._metrics.seconds.observe(time.monotonic() - began)
        if not info.withheld:
            watched.served_from = arrived
        self._say_made(model, kind, info, artifact.report, time.monotonic() - began)

    async def _artifact(
        self, model: str, kind: Kind[Any], watched: _Watched, samples: Sequence[Sample], recorded: int
    ) -> MadeArtifact:
        """Raises JobFailed, OSError."""
        served = self.registries[kind.name].served(model)
        history = History(
            watched.inherited, None if served is None else served.artifact, watched.arrived - watched.served_from
        )
        earlier = kind.earlier(history, len(samples))
        file = b"" if earlier is None else await asyncio.to_thread(kind.codec.dump, earlier)
        job = Job(kind.name, model, watched.shape, samples, kind.options(), file, recorded)
        return await make_in_subprocess(kind, job, timeout_s=self._config.timeout_s, command=self._command)

    def _failed(self, model: str, kind: Kind[Any], watched: _Watched, error: Exception) -> None:
        why = error.why if isinstance(error, JobFailed) else "failed"
        self._metrics.ended(kind.name, why)
        took_s = self._config.timeout_s if why == "timed_out" else 0.0
        more, pause_s = watched.pace.failed(), watched.retry.failed(self._now(), took_s)
        when = f"in {pause_s:g} s" if more is None else f"when {more} more sequences have come"
        _LOG.error("%s of %r was not made; it is tried again %s: %s", kind.name, model, when, error)

    def _merge_recorded(self, model: str, keeps: str) -> None:
        """They are among the others from now on."""
        if recorded := self.recent.sequences((model, keeps, True)):
            self.recent.forget((model, keeps, True))
            for sample in recorded:
                self.recent.add((model, keeps, False), sample)

    def _say_made(
        self, model: str, kind: Kind[Any], info: ArtifactInfo, report: Mapping[str, Any], seconds: float
    ) -> None:
        self._metrics.ended(kind.name, "withheld" if info.withheld else "published")
        if info.withheld:
            _LOG.warning("%s of %r: version %d is kept and not served: %s",
                         kind.name, model, info.version, info.withheld)  # fmt: skip
        else:
            _LOG.info("%s of %r: version %d, made of %d sequences in %.1f s: %s",
                      kind.name, model, info.version, info.sequences, seconds, json.dumps(dict(report)))  # fmt: skip


async def make_in_subprocess(kind: Kind[M], job: Job, *, timeout_s: float, command: Sequence[str]) -> M:
    """What ``command`` makes of ``job`` in a process of its own, which is killed after ``timeout_s`` or when this is
    cancelled. Raises JobFailed, OSError."""
    data = await run_job(command, lambda: dump_job(job), timeout_s=timeout_s)
    try:
        artifact = await asyncio.to_thread(kind.codec.load, data)
    except Damaged as error:
        raise JobFailed(f"it left no artifact: {error}") from error
    if not kind.fits(artifact, job):
        raise JobFailed("it left another artifact than it was asked for")
    return artifact
