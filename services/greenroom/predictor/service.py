"""The predictor as a service: ``traces`` in, versions of artifacts out, forecasts from those that are served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from greenroom.core.artifacts.forecast_kinds import STATISTICS
from greenroom.core.messages import Trace, Undecodable
from greenroom.fabric.committable_offsets import PrefixTracker
from greenroom.fabric.group_positions import GroupPositions
from greenroom.fabric.lifecycle import Runner
from greenroom.fabric.log import GroupConsumer, Log, Record
from greenroom.fabric.topics import TRACES
from greenroom.predictor.config import PredictorConfig
from greenroom.predictor.kinds.registry import FORECAST_KINDS, MAKE, POLICY_KINDS, known_kind
from greenroom.predictor.kinds.statistics.library import Library
from greenroom.predictor.kinds.statistics.publisher import Publisher
from greenroom.predictor.kinds.statistics.served import Forecast
from greenroom.predictor.kinds.statistics.snapshot import SNAPSHOTS, Snapshot
from greenroom.predictor.making.kind import Kind, TracedSequence, kept_of
from greenroom.predictor.making.maker import Maker
from greenroom.predictor.metrics import PredictorMetrics
from greenroom.predictor.serving.forecasts import Forecasts
from greenroom.predictor.traces.counts import BadTrace, SequenceCounts, count, picks_of, tokens_of
from greenroom.predictor.traces.dead_letters import DeadLetterWriter, dead_letter_of
from greenroom.predictor.traces.reading import trace_of
from greenroom.predictor.traces.samples import Sample
from greenroom.predictor.versions.registry import VersionRegistry
from greenroom.predictor.versions.store import VersionStore, store_of
from greenroom.predictor.versions.unsaved import Unsaved

_LOG = logging.getLogger(__name__)
_POLL_S = 1.0
_AT_ONCE = 16
"""Traces may have megabytes."""


class PredictorService(Runner):
    """One is meant to run: several would each learn from a part of the traces.

    A sequence is counted in memory when its trace is read. Its offset is finished when a version that contains it is
    kept, and committed when all offsets before it are finished too. The version also holds the ids of the sequences
    that were counted last. So nothing is lost after a crash and nothing counts twice: what is read again is not in the
    version that the start finds, or its id is.
    """

    def __init__(
        self,
        config: PredictorConfig,
        log: Log,
        metrics: PredictorMetrics,
        *,
        store: VersionStore[Snapshot] | None = None,
        after_publish: Callable[[], None] | None = None,
        make: Sequence[str] = MAKE,
    ) -> None:
        """``store``: of statistics; None: in the state folder. ``make``: the command that makes all other kinds, see
        Maker. Raises InvalidConfig."""
        super().__init__("predictor")
        self._config = config
        self._log = log
        self._metrics = metrics
        self._after_publish = after_publish
        self.library = Library(
            max_bytes=config.max_bytes,
            half_life_sequences=config.half_life_sequences,
            seen_window=config.seen_window,
        )
        self.publisher = Publisher(
            self.library, store or store_of(SNAPSHOTS, config.state_dir, config.keep), metrics
        )  # fmt: skip
        learning, building = config.learning, config.building
        self._forecasting = None if learning.off else ThreadPoolExecutor(1, thread_name_prefix="forecasts")
        self.learned = Maker(
            [kind(learning) for kind in FORECAST_KINDS.values()], learning, metrics.learning,
            state_dir=config.state_dir, keep=config.keep, command=make, executor=self._forecasting,
        )  # fmt: skip
        self.policies = Maker(
            [kind(building) for kind in POLICY_KINDS.values()], building, metrics.building,
            state_dir=config.state_dir, keep=config.keep, command=make,
        )  # fmt: skip
        self._makers = (self.learned, self.policies)
        self._forecasts = Forecasts(
            self.publisher.registry, self.learned, metrics, self._forecasting,
            forecast_s=learning.forecast_s, max_waiting=learning.max_waiting,
        )  # fmt: skip
        self._consumer: GroupConsumer | None = None
        self._held = GroupPositions(TRACES)
        self._unsaved = Unsaved(most=config.max_unsaved, publish_every=config.publish_every, metrics=metrics)
        self._dead_letters = DeadLetterWriter(
            log, metrics, append_timeout_s=config.append_timeout_s,
            retry_s=config.retry_s, max_retry_s=config.max_retry_s, tell=self._tell,
        )  # fmt: skip
        self._publishing = False
        self._trouble: str | None = None

    # -- its life ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until ``end``; what was learnt is then kept and committed. It has begun when it has taken up what was kept
        and joined its group. Raises InvalidConfig where artifacts can not be kept, LogUnavailable where the log was
        never there, LogFailed where it can not be used any more, and whatever else should not happen."""
        await self.publisher.open()
        try:
            for maker in self._makers:
                await maker.open()
            self._consumer = self._log.group(TRACES, self._config.group, self)
            async with self._consumer as consumer:
                self.begun.set()
                async with asyncio.TaskGroup() as tasks:
                    reading = tasks.create_task(self._read_always(consumer))
                    others = [tasks.create_task(self._publish_always()), tasks.create_task(self._watch_lag())]
                    making = [tasks.create_task(maker.run()) for maker in self._makers]
                    await self.ending.wait()
                    for one in (reading, *making):
                        one.cancel()
                    await self._settle(self.drain_s)
                    for other in others:
                        other.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            for maker in self._makers:
                await maker.close()
            if self._forecasting is not None:
                self._forecasting.shutdown(wait=False, cancel_futures=True)
            await self.publisher.registry.close()

    @property
    def unready(self) -> str | None:
        if self.ending.is_set():
            return "it is stopping"
        if not self.begun.is_set():
            return "it has not joined its group yet"
        return self._trouble

    def _tell(self, trouble: str | None) -> None:
        self._trouble = trouble

    # -- asked by others -----------------------------------------------------------------------------------------

    def registry(self, kind: str) -> VersionRegistry[Any, Any]:
        """The versions of one kind; "": of statistics. Raises InvalidRequest."""
        if kind in ("", STATISTICS):
            return self.publisher.registry
        registries = {name: one for maker in self._makers for name, one in maker.registries.items()}
        return registries[known_kind(kind, "kind", registries)]

    def artifacts_asked(self, model: str, kind: str) -> None:
        """A worker wants artifacts of ``kind``."""
        self.policies.asked(model, kind)

    async def forecast(
        self, model: str, task_type: str, previous: bytes, predictor: str = "", within_s: float = math.inf
    ) -> Forecast:
        """See Forecasts.forecast."""
        began = time.perf_counter()
        forecast = await self._forecasts.forecast(model, task_type, previous, predictor, within_s)
        self.library.touch(model, task_type)
        self._metrics.forecasting.observe(time.perf_counter() - began)
        return forecast

    # -- what the consumer tells ---------------------------------------------------------------------------------

    async def assigned(self, partitions: Mapping[int, int]) -> None:
        self._held.take(partitions)

    async def revoked(self, partitions: Sequence[int]) -> None:
        """Write a last version, so that the next instance does not learn the same again."""
        if self._publishing:
            await self._settle(self._config.revoke_s)
        for partition in self._held.give(partitions):
            self._metrics.lag.remove(str(partition))

    # -- learning ------------------------------------------------------------------------------------------------

    async def _read_always(self, consumer: GroupConsumer) -> None:
        while True:
            room = await self._unsaved.room()
            for record, tracker in self._held.begin(await consumer.poll(_POLL_S, min(_AT_ONCE, room))):
                await self._take(record, tracker)

    async def _take(self, record: Record, tracker: PrefixTracker) -> None:
        if not self._holds(record, tracker):
            return
        try:
            trace = trace_of(record)
            self.library.check(trace)
            kinds = [kind for maker in self._makers for kind in maker.keeping(trace.model)]
            counts, kept = await asyncio.to_thread(_counted, trace, kinds)
        except (Undecodable, BadTrace) as error:
            await self._dead_letters.write(dead_letter_of(record, error))
            tracker.finish(record.offset)
            return
        async with self.publisher.learning:
            self._learn(record, tracker, trace, counts, kept)

    def _holds(self, record: Record, tracker: PrefixTracker) -> bool:
        """Whether this instance still has to learn it. Its partition may be revoked while it waits, and assigned again;
        the record is then read again."""
        return self._held.trackers.get(record.partition) is tracker

    def _learn(
        self,
        record: Record,
        tracker: PrefixTracker,
        trace: Trace,
        counts: SequenceCounts,
        kept: Mapping[str, Sample | None],
    ) -> None:
        if not self._holds(record, tracker):
            return
        if self.library.has_seen(trace.model, trace.request_id):
            self._metrics.duplicates.inc()
            if trace.model not in self._unsaved:
                tracker.finish(record.offset)
                return
        elif not trace.rows:
            self._metrics.empty.inc()
            tracker.finish(record.offset)
            return
        else:
            for gone in self.library.learn(trace, counts):
                self._evicted(gone.model, gone.task_type)
            for maker in self._makers:
                maker.take(trace, kept)
            self._metrics.sequences.inc()
            self._metrics.statistics_bytes.set(self.library.nbytes)
        self._unsaved.add(trace.model, tracker, record.offset)

    def _evicted(self, model: str, task_type: str | None) -> None:
        self._metrics.evicted.labels("model" if task_type is None else "task_type").inc()
        what = "all of it" if task_type is None else f"its task type {task_type!r}"
        _LOG.warning("%r: %s is forgotten, the budget of %d bytes is full", model, what, self._config.max_bytes)
        if task_type is None:
            self._unsaved.forget(model)

    # -- versions and commits ------------------------------------------------------------------------------------

    async def _publish_always(self) -> None:
        wait_s = self._config.retry_s
        self._publishing = True
        try:
            while True:
                await self._unsaved.something.wait()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.publish_after_s):
                        await self._unsaved.due.wait()
                if await self._publish():
                    wait_s = self._config.retry_s
                else:
                    await asyncio.sleep(wait_s)
                    wait_s = min(self._config.max_retry_s, wait_s * 2)
                    self._unsaved.due.set()
        finally:
            self._publishing = False

    async def _publish(self) -> bool:
        """A version of every model that has something new, then the commit. False where one could not be written."""
        self._unsaved.due.clear()
        failure: OSError | None = None
        for model in self._unsaved.models:
            offsets = self._unsaved.begin(model)
            try:
                await self._publish_model(model)
            except OSError as error:
                self._unsaved.failed(model, offsets)
                failure = error
            else:
                self._unsaved.kept(model, offsets)
        if failure is not None:
            self._trouble = f"no version can be written: {failure}"
            self._metrics.failures.inc()
            _LOG.error("a version could not be written and is tried again: %s", failure)
        else:
            self._trouble = None
        self._unsaved.written()  # before the commit, which may wait for what waits for this
        if self._after_publish is not None:
            self._after_publish()
        await self._commit()
        return failure is None

    async def _publish_model(self, model: str) -> None:
        if self._unsaved.to_forget(model):
            await self.publisher.registry.forget(model)
            for maker in self._makers:
                await maker.forget(model)
            self._unsaved.forgotten(model)
        await self.publisher.publish(model)

    async def _settle(self, within_s: float) -> None:
        """Keep and commit all that was learnt, as far as the time allows."""
        self._unsaved.due.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._unsaved.saved.wait()
        await self._commit()

    async def _commit(self) -> None:
        await self._held.commit(self._consumer)

    async def _watch_lag(self) -> None:
        while True:
            async for partition, behind in self._held.lags(self._log):
                self._metrics.lag.labels(str(partition)).set(behind)
            await self._commit()  # what needed no version: duplicates, dead letters
            await asyncio.sleep(self._config.lag_every_s)


def _counted(trace: Trace, kinds: Sequence[Kind[Any]]) -> tuple[SequenceCounts, dict[str, Sample | None]]:
    """For statistics, and what the other kinds keep. Called in any thread. Raises BadTrace."""
    counts, tokens = count(trace), tokens_of(trace)
    if not trace.rows:
        return counts, {}
    sequence = TracedSequence(picks_of(trace), trace.num_experts, trace.task_type, tokens, trace.prompt_rows)
    return counts, kept_of(kinds, sequence)
