"""The pipeline as a Generator: requests onto the log, tokens from workers, ends from the journal."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from greenroom.core.clock import SteadyClock
from greenroom.core.errors import InvalidRequest, Saturated
from greenroom.core.generation import Event, Finished, GenerationRequest, ServedModel
from greenroom.core.inference import InferenceRequest
from greenroom.core.messages import (
    AcceptedRequest,
    Cancel,
    Inference,
    Member,
    MemberKind,
    Outcome,
    Request,
    encode,
)
from greenroom.fabric import telemetry
from greenroom.fabric.lifecycle import Part, reached
from greenroom.fabric.log import AppendNotSent, AppendRefused, AppendUnknown, Log, LogError, LogFailed
from greenroom.fabric.log.health import LogHealth
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.topics import REQUESTS
from greenroom.gateway.errors import ApiError, unavailable
from greenroom.gateway.pipeline.config import PipelineConfig
from greenroom.gateway.pipeline.early_expiry import with_clocks
from greenroom.gateway.pipeline.in_flight import InFlightRequest, InFlightRequests
from greenroom.gateway.pipeline.journal import JournalReader
from greenroom.gateway.pipeline.served_model import PoolModel
from greenroom.gateway.pipeline.stream_book import StreamBook
from greenroom.gateway.pipeline.tokens_service import TokensService

AnyRequest = GenerationRequest | InferenceRequest
_LOG = logging.getLogger(__name__)
_PROMPT_CHARS = 8192
_CANCEL_AGAIN_S = 1.0
_MOST_APPENDS = 10_000
"""Appends at once. More requests are refused. One whose client leaves then runs to its end: no cancel is sent."""
_OLDER_RETRY_S = 5.0
_LOOK_S = 1.0
_LATE_MS = 5_000
"""How long after its deadline a keyed request without an outcome is ended here. A scheduler would have ended it."""


class Pipeline(Part):
    """A ``greenroom.core.generation.Generator`` on a log.

    ``tokens`` is the servicer that workers send tokens to, at ``address``, which must be known before the start.
    ``start`` returns once the journal has been read from where requests in flight may have ended. Requests with an
    idempotency key are refused until the whole retained journal has been read, so that a key's outcome is known
    (rule 10). ``text_digest``: of the tokenizer in use here; a worker with another one is ignored. None: any will do.
    ``health``: of ``log``, where that can fall silent.
    """

    def __init__(
        self,
        config: PipelineConfig,
        *,
        instance: str,
        address: str = "",
        log: Log,
        directory: Directory,
        text_digest: str | None = None,
        health: LogHealth | None = None,
    ) -> None:
        super().__init__("pipeline")
        self._config = config
        self._instance = instance
        self.address = address
        self._log = log
        self._directory = directory
        self._clock = SteadyClock()
        self.in_flight = InFlightRequests(StreamBook(), config.keep_outcomes_bytes)
        self.tokens = TokensService(instance, self.in_flight)
        self._announcer = Announcer(log, self._member)
        self._model = PoolModel(directory, config.pool, text_digest)
        self._health = health
        self._journal = JournalReader(log, config.pool, outcome=self._outcome, older=self.in_flight.older)
        self._appends: set[asyncio.Task[None]] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        since_ms = self._clock() - (self._config.max_timeout_s + self._config.journal_margin_s) * 1000
        following = self.tasks.start(self._journal.follow(since_ms), name="journal", forever=True)
        await reached(self._journal.caught_up, following)
        self.tasks.start(self._journal.read_older(), name="older journal")
        self.tasks.start(self._watch(), name="requests without an end", forever=True)
        await self._announcer.start()

    async def stop(self) -> None:
        """Announces that this gateway leaves, and ends its tasks. Requests go on without it."""
        await self._announcer.stop()
        if self._appends:
            _, left = await asyncio.wait(self._appends, timeout=self._config.append_timeout_s)
            for append in left:
                append.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        await super().stop()

    @property
    def model(self) -> ServedModel:
        """Raises ApiError (503) before a worker has said what it serves."""
        return self._model.served()

    @property
    def ready(self) -> bool:
        return self.unready is None

    @property
    def unready(self) -> str | None:
        if not self._journal.caught_up.is_set():
            return "the journal has not been read to its end yet"
        silent = None if self._health is None else self._health.trouble(self._clock())
        return self._model.unready if silent is None else silent

    def _member(self) -> Member:
        return Member(
            member=MemberKind.GATEWAY,
            instance=self._instance,
            address=self.address,
            ttl_ms=self._config.ttl_ms,
            pool=self._config.pool,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Tokens in order, then exactly one Finished. A second call under an idempotency key gets the events of the
        first, from the beginning. Raises before the first token: InvalidRequest, Saturated, Conflict, ApiError (503,
        409)."""
        return self._events(request)

    def infer(self, request: InferenceRequest) -> AsyncIterator[Event]:
        """The same for an inference, which has no tokens: one Finished, with its outputs."""
        return self._events(request)

    async def _events(self, request: AnyRequest) -> AsyncIterator[Event]:
        began = self._clock()
        running = self.in_flight.join(request.request_id, request.digest)
        if running is not None and not request.keyed:
            raise InvalidRequest(f"request {request.request_id!r} is running already", code="duplicate_request")
        if running is None:
            if request.keyed and self._journal.reading_older:
                raise unavailable(
                    "the outcomes of earlier requests are being read: send this one again later, or without its "
                    "idempotency key",
                    "keys_not_read",
                    _OLDER_RETRY_S,
                )
            known = self.in_flight.known(request.request_id, request.digest) if request.keyed else None
            if known is not None:
                for event in known:
                    yield event
                return
            running = self._begin(request)
        if self._health is None or not self._health.silent(began):
            running.doubt = None
        try:
            async for event in running.events():
                yield self._with_clocks(event, began, request) if isinstance(event, Finished) else event
        finally:
            # A request with a key goes on without its client: a retry gets it.
            if not request.keyed:
                self._give_up(running, request)

    def keyed_request(self, request_id: str) -> InFlightRequest | None:
        """The request with an idempotency key that is in flight under that id: it outlives its clients."""
        found = self.in_flight.find(request_id)
        return found if found is not None and found.keyed else None

    def _begin(self, request: AnyRequest) -> InFlightRequest:
        """Puts it into the table and sends it. Raises InvalidRequest, Saturated."""
        self._check_room(request)
        record = self._record(request)
        running = self.in_flight.begin(
            request.request_id, request.digest, keyed=request.keyed, deadline_ms=record.deadline_ms + _LATE_MS
        )
        running.append = self._in_background(self._append(running, record), f"append {request.request_id}")
        return running

    async def _append(self, running: InFlightRequest, record: AcceptedRequest) -> None:
        """Sends it to the log. A failure becomes its end here."""
        failure: Exception
        try:
            await self._log.append(
                REQUESTS,
                encode(record),
                key=record.request_id.encode(),
                headers=telemetry.inject(),
                timeout_s=self._config.append_timeout_s,
            )
            return
        except AppendRefused as error:
            _LOG.warning("request %s can not be queued: %s", record.request_id, error)
            failure = _larger_than_queued(record)
            maybe_taken = False
        except (AppendNotSent, LogFailed) as error:
            _LOG.warning("request %s was not sent: %s", record.request_id, error)
            failure = unavailable(
                f"request {record.request_id} was not taken: the log does not take requests now; send it again later",
                "not_sent",
            )
            maybe_taken = False
        except AppendUnknown:
            if running.finished is not None or self.in_flight.book.opened(record.request_id):
                return  # A worker has had it, so it was taken.
            failure = unavailable(
                f"request {record.request_id} may or may not have been taken: the log did not answer",
                "unknown_acknowledgement",
            )
            maybe_taken = True
        except Exception as error:
            failure, maybe_taken = error, True
        if maybe_taken and not record.keyed:
            running.end(failure)  # Its reader gives it up, and a cancel follows (rule 8).
        else:
            self.in_flight.disown(running, failure)

    async def cancel(self, request_id: str) -> None:
        """Ends a request, wherever it runs and whichever gateway took it. Raises ApiError (503) where the log did not
        take the cancel, or did not say so."""
        self.tokens.hint_cancel(request_id)
        deadline_ms = int(self._clock() + self._config.max_timeout_s * 1000)
        running = self.in_flight.find(request_id)
        try:
            if running is not None and running.append is not None:
                await asyncio.wait({running.append})
            await self._cancel(request_id, deadline_ms, "it was cancelled")
            if running is not None:
                running.cancelled = True
        except AppendUnknown as error:
            raise unavailable(
                f"request {request_id} may or may not be cancelled: the log did not answer", "unknown_acknowledgement"
            ) from error
        except LogError as error:
            _LOG.warning("the cancel of request %s was not sent: %s", request_id, error)
            raise unavailable(
                f"request {request_id} was not cancelled: the log takes nothing now; cancel it again later", "not_sent"
            ) from error

    def _give_up(self, running: InFlightRequest, request: AnyRequest) -> None:
        """Its client has gone, or was told that it is unknown: a cancel goes the request's own way (rule 9). Nothing
        happens where it has ended."""
        self.tokens.hint_cancel(running.request_id)
        if not self.in_flight.forget(running):
            return
        if running.append is not None:
            running.append.cancel()
        work = self._cancel_for_certain(running, self._deadline(request))
        if len(self._appends) >= _MOST_APPENDS:
            work.close()
            self.in_flight.book.disown(running.request_id)
            return
        self._in_background(work, f"cancel {running.request_id}")

    def _in_background(self, append: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(append, name=name)
        self._appends.add(task)
        task.add_done_callback(self._appends.discard)
        return task

    async def _cancel_for_certain(self, running: InFlightRequest, deadline_ms: int) -> None:
        """Sends a cancel until it is acknowledged, or the deadline has passed. Meanwhile workers are told that the
        request has ended: without the cancel they would begin it again and again."""
        request_id = running.request_id
        if running.append is not None:
            await asyncio.wait({running.append})
        while self._clock() < deadline_ms:
            try:
                await self._cancel(request_id, deadline_ms, "its client has gone")
                return
            except AppendRefused as error:
                _LOG.error("the cancel of %s is not taken: %s", request_id, error)
                break
            except LogError as error:
                _LOG.warning("the cancel of %s was not acknowledged: %s", request_id, error)
                await asyncio.sleep(_CANCEL_AGAIN_S)
        self.in_flight.book.disown(request_id)

    async def _cancel(self, request_id: str, deadline_ms: int, reason: str) -> None:
        """Raises LogError."""
        record = Cancel(request_id=request_id, pool=self._config.pool, deadline_ms=deadline_ms, reason=reason)
        await self._log.append(
            REQUESTS,
            encode(record),
            key=request_id.encode(),
            headers=telemetry.inject(),
            timeout_s=self._config.append_timeout_s,
        )

    def _record(self, request: AnyRequest) -> AcceptedRequest:
        if isinstance(request, InferenceRequest):
            return self._inference(request)
        return Request(
            request_id=request.request_id,
            pool=self._config.pool,
            model=self.model.name,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            accepted_ms=int(self._clock()),
            deadline_ms=self._deadline(request),
            prompt=request.prompt[:_PROMPT_CHARS],
            tenant=request.tenant,
            keyed=request.keyed,
            digest=request.digest,
            task_type=request.task_type,
            slo=request.slo,
            priority=request.priority,
            reply_to=self._instance,
        )

    def _inference(self, request: InferenceRequest) -> Inference:
        return Inference(
            request_id=request.request_id,
            pool=self._config.pool,
            model=self.model.name,
            inputs=request.inputs,
            accepted_ms=int(self._clock()),
            deadline_ms=self._deadline(request),
            parameter=request.parameter,
            tenant=request.tenant,
            keyed=request.keyed,
            digest=request.digest,
            slo=request.slo,
            priority=request.priority,
            reply_to=self._instance,
        )

    def _deadline(self, request: AnyRequest) -> int:
        timeout_s = min(request.timeout_s or self._config.default_timeout_s, self._config.max_timeout_s)
        return int(self._clock() + timeout_s * 1000)

    def _check_room(self, request: AnyRequest) -> None:
        """Rule 8: a request is refused before it is accepted. Raises Saturated.

        The depth is the larger of two: what the pool's scheduler last said, which is up to a quarter of a second old
        where it matters, and how many of this gateway's own requests wait.
        """
        if len(self._appends) >= _MOST_APPENDS:
            raise Saturated(f"{len(self._appends)} requests wait for the log to take them, as many as may")
        if request.keyed and (keyed := self.in_flight.keyed) >= self._config.max_keyed:
            raise Saturated(f"{keyed} requests with idempotency keys run, as many as are allowed")
        depths = [
            member.depth
            for member in self._directory.of(MemberKind.SCHEDULER, pool=self._config.pool)
            if member.depth is not None
        ]
        if not depths:
            return  # No scheduler is there now. What is accepted waits for the next one.
        depth = max(depths, key=lambda depth: depth.waiting)
        waiting = max(depth.waiting, self.in_flight.book.unopened)
        if waiting >= depth.limit:
            raise Saturated(f"{waiting} requests wait, as many as may", retry_after_s=max(1.0, depth.wait_ms / 1000))

    def _with_clocks(self, end: Finished, began: float, request: AnyRequest) -> Finished:
        now = self._clock()
        timeout_ms = self._deadline(request) - now
        return with_clocks(end, began, timeout_ms, now, keyed=request.keyed, health=self._health)

    async def _watch(self) -> None:
        """Ends keyed requests that nobody else ends. While the log is silent no outcome is read: clients are told so,
        and do not hang for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self._clock()
            if self._health is not None and self._health.silent(now):
                self.in_flight.expire(now, _no_outcome())
                self.in_flight.doubt(now, self._config.quiet_s * 1000, _no_outcome())
            else:
                self.in_flight.expire(now)
                self.in_flight.trust()

    # -- the journal ---------------------------------------------------------------------------------------------

    def _outcome(self, outcome: Outcome) -> None:
        self.tokens.unbind(outcome.request_id)
        self.in_flight.outcome(outcome)

    @property
    def journal_unreadable(self) -> int:
        """Records of the journal that could not be read and were passed over."""
        return self._journal.unreadable


def _larger_than_queued(record: AcceptedRequest) -> Exception:
    """A text is a request that can not be served; of an image its body is too large."""
    if isinstance(record, Inference):
        return ApiError(413, "the inputs of one request are larger than can be queued here", code="body_too_large")
    return InvalidRequest("the request is larger than can be queued here; shorten it", code="too_large")


def _no_outcome() -> ApiError:
    return unavailable(
        "the log does not answer, so how this request ends can not be told: send it again later; under an idempotency "
        "key that finds its outcome",
        "outcome_unknown",
        5.0,
    )
