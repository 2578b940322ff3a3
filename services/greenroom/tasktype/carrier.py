"""Carries one record of ``requests`` to its end: appended to ``tasks``, or buried. Tries for as long as it takes."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

from greenroom.core.messages import DeadLetter, Rejected, encode, without_payload
from greenroom.fabric import telemetry
from greenroom.fabric.current_request import request_id
from greenroom.fabric.log import (
    AppendNotSent,
    AppendRefused,
    AppendUnknown,
    Headers,
    Log,
    LogError,
    LogFailed,
    Position,
    Record,
)
from greenroom.fabric.topics import DEAD_LETTERS, TASKS
from greenroom.tasktype.config import TaskTypeConfig
from greenroom.tasktype.decide import Bury, Forward, bury, decide
from greenroom.tasktype.extractor import Extractor
from greenroom.tasktype.metrics import TaskTypeMetrics

_LOOK_S = 1.0
_CARRIED = ("traceparent", "tracestate")
_LOG = logging.getLogger(__name__)


class Carrier:
    """``after_append``: called when a record is in ``tasks`` and nothing of it is committed."""

    def __init__(
        self,
        config: TaskTypeConfig,
        log: Log,
        extractor: Extractor,
        metrics: TaskTypeMetrics,
        *,
        after_append: Callable[[], None] | None = None,
    ) -> None:
        self._config = config
        self._log = log
        self._extractor = extractor
        self._metrics = metrics
        self._after_append = after_append
        self._pools = 0
        self._look_again = 0.0
        self._struggling: dict[int, float] = {}

    async def start(self) -> None:
        self._pools = await self._log.partitions(TASKS)

    @property
    def stuck_s(self) -> float:
        """For how long the append that has been tried for longest has been tried."""
        now = time.monotonic()
        return max((now - since for since in self._struggling.values()), default=0.0)

    async def carry(self, record: Record) -> None:
        """Returns when ``record`` needs not be read again. Cancelled, it may or may not have been passed on."""
        decision = decide(record, self._extractor, self._pools)
        if isinstance(decision, Bury) and await self._more_pools():
            decision = decide(record, self._extractor, self._pools)
        if isinstance(decision, Forward):
            request_id.set(decision.request_id)
            try:
                position = await self._forward(record, decision)
            except AppendRefused as error:
                decision = bury(
                    record,
                    f"it could not be passed on: {error}",
                    self._pools,
                    told="it could not be passed on",  # to its client no topic is named
                    request_id=decision.request_id,
                    pool=decision.partition,
                )
            else:
                self._count(record, decision, position)
                return
        await self._bury(record, decision)

    async def _more_pools(self) -> bool:
        """Whether `tasks` has got partitions since it was last looked at, which is done seldom."""
        now = time.monotonic()
        if now < self._look_again:
            return False
        self._look_again = now + _LOOK_S
        known = self._pools
        try:
            self._pools = await self._log.partitions(TASKS)
        except LogFailed:
            raise
        except LogError as error:
            _LOG.info("how many partitions %s has is not known now: %s", TASKS, error)
        return self._pools > known

    async def _forward(self, record: Record, forward: Forward) -> Position:
        key = record.key or forward.request_id.encode()
        parent = telemetry.extract(record.headers)
        with telemetry.span("tasktype", parent=parent, kind="consumer", request_id=forward.request_id) as span:
            span.set("task_type", forward.task_type or "")
            position = await self._append(TASKS, forward.value, key, forward.partition, _headers(record))
        if self._after_append is not None:
            self._after_append()
        return position

    def _count(self, record: Record, forward: Forward, position: Position) -> None:
        if forward.task_type is None or forward.source is None:
            self._metrics.cancels.inc()
            return
        self._metrics.request(forward.task_type, forward.source)
        self._metrics.delay.observe(max(0, position.timestamp_ms - record.timestamp_ms) / 1000)

    async def _bury(self, record: Record, decision: Bury) -> None:
        letter = decision.letter
        _LOG.warning(
            "%s[%d]@%d goes to the dead letters: %s", letter.topic, letter.partition, letter.offset, letter.reason
        )
        await self._write_letter(letter, record)
        if decision.rejected is not None:
            await self._reject(decision.rejected, record)
        self._metrics.dead_letters.inc()

    async def _write_letter(self, letter: DeadLetter, record: Record) -> None:
        try:
            await self._append(DEAD_LETTERS, encode(letter), record.key, None, _headers(record))
        except AppendRefused:
            smaller = encode(without_payload(letter))
            await self._append(DEAD_LETTERS, smaller, None, None, (), give_up=False)

    async def _reject(self, rejected: Rejected, record: Record) -> None:
        key = record.key or rejected.request_id.encode()
        await self._append(TASKS, encode(rejected), key, rejected.pool, _headers(record), give_up=False)

    async def _append(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        partition: int | None,
        headers: Headers,
        *,
        give_up: bool = True,
    ) -> Position:
        """Until it is acknowledged. ``give_up``: raises AppendRefused where it is refused again and again."""
        token = object()
        refused = tries = 0
        try:
            while True:
                try:
                    return await self._log.append(
                        topic,
                        value,
                        key=key,
                        partition=partition,
                        headers=headers,
                        timeout_s=self._config.append_timeout_s,
                    )
                except (AppendUnknown, AppendNotSent) as error:
                    reason = str(error)
                except AppendRefused as error:
                    reason = str(error)
                    refused += 1
                    if give_up and refused >= self._config.append_tries:
                        raise
                self._struggling.setdefault(id(token), time.monotonic())
                self._metrics.retries.inc()
                wait_s = min(self._config.max_retry_s, self._config.retry_s * 2 ** min(tries, 16))
                tries += 1
                _LOG.warning("append to %s is tried again in %.2f s: %s", topic, wait_s, reason)
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
        finally:
            self._struggling.pop(id(token), None)


def _headers(record: Record) -> Headers:
    """Those of ``record``, with the current span in place of the one that it came with."""
    if not telemetry.enabled():
        return record.headers
    return telemetry.inject([(name, value) for name, value in record.headers if name not in _CARRIED])
