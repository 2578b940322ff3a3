"""Writes the routing traces of finished sequences to the log. They never hold a worker up (rule 13)."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import replace

from greenroom.core.messages import Task, Trace, encode
from greenroom.core.messages.traces import MAX_REPORTED
from greenroom.fabric.log import Log, LogError
from greenroom.worker.generation_engine import RecordedRouting
from greenroom.worker.service_config import TraceConfig
from greenroom.worker.service_counters import ServiceCounters

log = logging.getLogger(__name__)


class TraceWriter:
    """Writes one trace after the other. A trace that finds the queue full, or that the log does not take, is counted
    and dropped."""

    def __init__(
        self,
        to: Log,
        topic: str,
        config: TraceConfig,
        counters: ServiceCounters,
        *,
        pool: int,
        model: str,
        worker: str,
    ) -> None:
        self._log = to
        self._topic = topic
        self._config = config
        self._counters = counters
        self._pool = pool
        self._model = model
        self._worker = worker
        self._waiting: asyncio.Queue[tuple[Task, RecordedRouting]] = asyncio.Queue(config.waiting)
        self._warned: set[type[LogError]] = set()
        """Of which errors a warning was logged: a slow broker's must not hide that the topic may not be written to."""

    @property
    def waiting(self) -> int:
        return self._waiting.qsize()

    def offer(self, task: Task, routed: RecordedRouting) -> None:
        """Queue a trace, without tokens unless they are to be told."""
        if not self._config.tokens and routed.tokens is not None:
            routed = replace(routed, tokens=None)
        try:
            self._waiting.put_nowait((task, routed))
        except asyncio.QueueFull:
            self._counters.traces_dropped += 1

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            task, routed = await self._waiting.get()
            try:
                await self._write(task, routed)
            finally:
                self._waiting.task_done()

    async def flush(self) -> None:
        """Returns when every queued trace was written or dropped."""
        await self._waiting.join()

    async def _write(self, task: Task, routed: RecordedRouting) -> None:
        trace = trace_of(task, routed, pool=self._pool, model=self._model, worker=self._worker)
        try:
            await self._log.append(
                self._topic,
                encode(trace),
                key=trace.request_id.encode(),
                timeout_s=self._config.timeout_ms / 1000.0,
            )
            self._counters.traces += 1
        except LogError as error:
            self._counters.traces_failed += 1
            new = type(error) not in self._warned
            self._warned.add(type(error))
            log.log(logging.WARNING if new else logging.DEBUG, "a routing trace was not written: %s", error)


def trace_of(task: Task, routed: RecordedRouting, *, pool: int, model: str, worker: str) -> Trace:
    rows, layers, k = routed.experts.shape
    wide = routed.experts.dtype.itemsize > 1
    return Trace(
        request_id=task.request.request_id,
        pool=pool,
        model=model,
        task_type=task.task_type,
        rows=rows,
        prompt_rows=routed.prompt_rows,
        layers=layers,
        k=k,
        num_experts=routed.num_experts,
        dtype="uint16" if wide else "uint8",
        experts=routed.experts.astype("<u2" if wide else "u1", copy=False).tobytes(),
        tokens=b"" if routed.tokens is None else routed.tokens.astype("<u4", copy=False).tobytes(),
        worker=worker,
        report=dict(itertools.islice(routed.report.items(), MAX_REPORTED)),
        artifacts=dict(routed.artifacts),
    )
