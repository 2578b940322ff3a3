"""Sends what a plan says, when it says it, and keeps a record of every request."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
import uuid
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from greenroom.core.errors import GreenroomError
from greenroom_load.generator_lag import Watch
from greenroom_load.plan import Plan, Planned
from greenroom_load.prompts import Ask
from greenroom_load.reply_record import Exchange, Failure, FailureKind, Meter, Record, Refused, clock
from greenroom_load.transport import Prepared, Transport

_LOG = logging.getLogger(__name__)
_AHEAD = 2_000
"""Requests that are made ready before the run begins, so that making them does not delay sending them; or as many as
``_AHEAD_S`` allow."""
_AHEAD_S = 2.0
_WARMUP_AT_ONCE = 4
_CANCEL_TIMEOUT_S = 10.0


class WarmupFailed(GreenroomError):
    """Not one of the warm-up requests ended well, so the run would measure errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that has been run. ``sending_s``: until the last request was sent, or was to be; ``duration_s``: until the
    last reply ended. ``started``: seconds since 1970. ``lags_s``, ``cpu_share``: see Watch.
    """

    records: tuple[Record, ...]
    sending_s: float
    duration_s: float
    started: float
    interrupted: bool
    peak_in_flight: int
    lags_s: tuple[float, ...]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class _Ready:
    planned: Planned
    request_id: str
    prepared: Prepared


class Runner:
    """One run. ``meter`` may be looked at while it goes on; ``stopping`` set ends it early, keeping what there is."""

    def __init__(self, plan: Plan, transport: Transport, model: str, stopping: asyncio.Event | None = None) -> None:
        self.meter = Meter()
        self._plan = plan
        self._transport = transport
        self._model = model
        self._name = uuid.uuid4().hex[:8]
        self._records: list[Record] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = stopping or asyncio.Event()
        self._gate: asyncio.Semaphore | None = None
        self._start = 0.0

    async def run(self) -> Outcome:
        """Raises WarmupFailed."""
        await self._warm_up()
        requests = self._requests()
        ahead = self._ahead(requests)
        if self._plan.bounds.max_concurrency is not None:
            self._gate = asyncio.Semaphore(self._plan.bounds.max_concurrency)
        gc.collect()
        gc.freeze()  # what lives by now lives on: collections in the run need not look at it
        watch = Watch()
        watching = asyncio.create_task(watch.run())
        started = time.time()
        self._start = clock()
        try:
            await self._send_and_drain(chain(ahead, requests))
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            gc.unfreeze()
        records = sorted(self._records, key=lambda record: record.index)
        last = max((record.end_s for record in records if record.end_s is not None), default=0.0)
        sending = max((max(record.intended_s, record.sent_s or 0.0) for record in records), default=0.0)
        return Outcome(
            records=tuple(records),
            sending_s=sending,
            duration_s=max(last, sending),
            started=started,
            interrupted=self.stopping.is_set(),
            peak_in_flight=self.meter.peak_in_flight,
            lags_s=tuple(watch.lags_s),
            cpu_share=watch.cpu_share,
        )

    @staticmethod
    def _ahead(requests: Iterator[_Ready]) -> list[_Ready]:
        until, ahead = clock() + _AHEAD_S, list[_Ready]()
        while len(ahead) < _AHEAD and clock() < until and (ready := next(requests, None)) is not None:
            ahead.append(ready)
        return ahead

    def _requests(self) -> Iterator[_Ready]:
        for planned in self._plan.requests():
            request_id = f"load-{self._name}-{planned.index}"
            yield _Ready(planned, request_id, self._transport.prepare(planned.ask, self._model, request_id))

    async def _warm_up(self) -> None:
        asks = enumerate(self._plan.warmup())
        failures: list[Failure] = []
        tried = 0

        async def some() -> None:
            nonlocal tried
            for number, ask in asks:
                tried += 1
                failure = await self._warm(ask, f"load-{self._name}-warm-up-{number}")
                if failure is not None:
                    failures.append(failure)

        async def all_of_them() -> None:
            await asyncio.gather(*(some() for _ in range(_WARMUP_AT_ONCE)))

        working, stopping = asyncio.create_task(all_of_them()), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.wait({working, stopping}, timeout=_CANCEL_TIMEOUT_S)
        if not working.cancelled():
            working.result()
        if failures and len(failures) == tried:
            first = failures[0]
            said = f": {first.message}" if first.message else ""
            raise WarmupFailed(
                f"none of the {tried} warm-up requests ended well ({first.label}{said}); "
                f"mend that first, or go on anyway with --warmup-requests 0"
            )

    async def _warm(self, ask: Ask, request_id: str) -> Failure | None:
        prepared = self._transport.prepare(ask, self._model, request_id)
        return await self._try(prepared, Exchange(Meter()))

    async def _send_and_drain(self, requests: Iterator[_Ready]) -> None:
        bounds = self._plan.bounds
        stopping = asyncio.create_task(self.stopping.wait())
        sending = asyncio.create_task(self._send_all(requests))
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                if self._tasks:
                    all_done = asyncio.create_task(_all_done(self._tasks))
                    await asyncio.wait(
                        {all_done, stopping}, timeout=bounds.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    all_done.cancel()
        finally:
            for task in (stopping, sending, *self._tasks):
                task.cancel()
            _, running = await asyncio.wait({stopping, sending, *self._tasks}, timeout=_CANCEL_TIMEOUT_S)
            if running:
                _LOG.error("%d requests could not be given up within %g s", len(running), _CANCEL_TIMEOUT_S)

    async def _send_all(self, requests: Iterator[_Ready]) -> None:
        """To the plan's end. Where a bound on concurrency holds requests back beyond the drain's time, the rest of
        those whose time has come are recorded as not sent: leaving them out would flatter the server."""
        bounds = self._plan.bounds
        until = None if bounds.duration_s is None else self._start + bounds.duration_s
        ready: _Ready | None = None
        try:
            for ready in requests:
                at_s = ready.planned.at_s
                delay = 0.0 if at_s is None else self._start + at_s - clock()
                await asyncio.sleep(max(0.0, delay))  # of 0 too: so what was sent before really goes out
                if self._gate is not None:
                    grace = 0.0 if at_s is None else bounds.drain_timeout_s
                    async with asyncio.timeout_at(None if until is None else until + grace):
                        await self._gate.acquire()
                if at_s is None and until is not None and clock() >= until:
                    return
                self._send(ready)
        except TimeoutError:
            if ready is not None and ready.planned.at_s is not None:
                for left in chain((ready,), requests):
                    self._unsent(left, "max_concurrency")

    def _leave(self) -> None:
        if self._gate is not None:
            self._gate.release()

    def _send(self, ready: _Ready) -> None:
        if len(self._tasks) >= self._plan.bounds.max_outstanding:
            self._leave()
            self._unsent(ready, "max_outstanding")
            return
        task = asyncio.create_task(self._one(ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, ready: _Ready) -> None:
        meter = self.meter
        meter.sent += 1
        meter.in_flight += 1
        meter.peak_in_flight = max(meter.peak_in_flight, meter.in_flight)
        exchange = Exchange(meter)
        failure: Failure | None = Failure(FailureKind.UNFINISHED)
        sent = clock()
        try:
            failure = await self._try(ready.prepared, exchange)
        finally:
            self._leave()
            meter.in_flight -= 1
            meter.finished += failure is None
            meter.failed += failure is not None
            self._records.append(self._record(ready, exchange, failure, sent))

    async def _try(self, prepared: Prepared, exchange: Exchange) -> Failure | None:
        timeout_s = self._plan.bounds.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._transport.send(prepared, exchange)
        except TimeoutError:
            return Failure(FailureKind.TIMEOUT, f"after {timeout_s:g} s")
        except Refused as refused:
            return refused.failure
        except Exception as error:
            _LOG.exception("a request failed by a defect of the generator")
            return Failure(FailureKind.CLIENT, type(error).__name__, str(error))
        return None

    def _record(self, ready: _Ready, exchange: Exchange, failure: Failure | None, sent: float) -> Record:
        start, planned, prompt = self._start, ready.planned, ready.planned.ask.prompt
        end = exchange.end if failure is None and exchange.end is not None else clock()
        first = exchange.first
        if first is None and failure is None:
            first = end
        counted = exchange.completion_tokens is None
        return Record(
            index=planned.index,
            intended_s=sent - start if planned.at_s is None else planned.at_s,
            sent_s=sent - start,
            first_s=None if first is None else first - start,
            end_s=end - start,
            gaps_s=array("d", exchange.gaps),
            task=prompt.task,
            prompt_name=prompt.name,
            request_id=exchange.request_id or ready.request_id,
            prompt_tokens=exchange.prompt_tokens,
            output_tokens=len(exchange.pieces) if exchange.completion_tokens is None else exchange.completion_tokens,
            tokens_counted=counted and exchange.first is not None,
            approximated=exchange.approximated,
            finish=exchange.finish,
            text="".join(exchange.pieces),
            expected=prompt.expected,
            repeat=prompt.repeat,
            targets=planned.ask.targets,
            failure=failure,
        )

    def _unsent(self, ready: _Ready, why: str) -> None:
        planned = ready.planned
        self.meter.failed += 1
        self._records.append(
            Record(
                index=planned.index,
                intended_s=planned.at_s if planned.at_s is not None else clock() - self._start,
                sent_s=None,
                task=planned.ask.prompt.task,
                prompt_name=planned.ask.prompt.name,
                targets=planned.ask.targets,
                failure=Failure(FailureKind.NOT_SENT, why),
            )
        )


async def _all_done(tasks: set[asyncio.Task[None]]) -> None:
    await asyncio.wait(set(tasks))
