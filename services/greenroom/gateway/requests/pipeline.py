"""The pipeline as a Generator: requests onto the log, tokens from workers, ends from the journal."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from greenroom.core.clock import SteadyClock
from greenroom.core.errors import Conflict, InvalidConfig, InvalidRequest, Saturated
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, ServedModel
from greenroom.core.logprobs import unpack_tokens
from greenroom.core.messages import (
    Cancel,
    Member,
    MemberKind,
    ModelCard,
    Outcome,
    Request,
    decode,
    encode,
)
from greenroom.fabric import telemetry
from greenroom.fabric.lifecycle import Part, reached
from greenroom.fabric.log import AppendNotSent, AppendRefused, AppendUnknown, Log, LogError, LogFailed
from greenroom.fabric.log.health import LogHealth, Skew, expired_early, told_ms
from greenroom.fabric.members import Announcer, Directory
from greenroom.fabric.topics import REQUESTS
from greenroom.gateway.errors import ApiError, unavailable
from greenroom.gateway.requests.in_flight import CONFLICT, Flight, Flights, as_finished
from greenroom.gateway.requests.journal import JournalReader
from greenroom.gateway.requests.stream_book import StreamBook
from greenroom.gateway.requests.tokens_service import TokensService

_LOG = logging.getLogger(__name__)
_PROMPT_CHARS = 8192
_CANCEL_AGAIN_S = 1.0
_MOST_CANCELS = 10_000
"""Cancels on their way. What leaves beyond that runs to its end."""
_OLDER_RETRY_S = 5.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """``pool``: the pool whose model is served here. ``append_timeout_s``: how long an append may take before it is
    unknown. ``default_timeout_s``, ``max_timeout_s``: from acceptance to a request's end. ``keep_outcomes_bytes``:
    outcomes of keyed requests that are kept for a retry. ``journal_margin_s``: how much of the journal is read, beyond
    ``max_timeout_s``, before a start is over: for clocks that differ, and for a claim to be met. ``quiet_s``: after how
    long without a token a client gets an error while the log is silent. ``ttl_ms``: of what the gateway says of itself
    on ``members``: a worker takes a gateway for gone that has been silent for so long."""

    pool: int = 0
    append_timeout_s: float = 10.0
    default_timeout_s: float = 600.0
    max_timeout_s: float = 3600.0
    keep_outcomes_bytes: int = 256 * 1024 * 1024
    journal_margin_s: float = 180.0
    quiet_s: float = 30.0
    ttl_ms: int = 6_000

    def __post_init__(self) -> None:
        if self.pool < 0:
            raise InvalidConfig("pool", self.pool, "it is a number from 0")
        above_0 = ("append_timeout_s", "default_timeout_s", "max_timeout_s", "keep_outcomes_bytes", "ttl_ms")
        for field in (*above_0, "journal_margin_s", "quiet_s"):
            if not getattr(self, field) > 0:
                raise InvalidConfig(field, getattr(self, field), "it is a number above 0")
        if self.default_timeout_s > self.max_timeout_s:
            raise InvalidConfig("default_timeout_s", self.default_timeout_s, f"at most {self.max_timeout_s:g}")


class Pipeline(Part):
    """As ``greenroom.core.generation.Generator`` has it, on a log.

    ``tokens`` is the servicer that workers send tokens to, at ``address``, which must be known when it is started;
    ``start`` returns once the journal has been read from where requests that are on their way may have ended. Requests
    with an idempotency key are refused until all that is retained has been, so that a key's outcome is known (rule 10).
    ``text_digest``: of the tokenizer in use here; workers with another are not served for. None: of any. ``health``: of
    ``log``, where that can fall silent.
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
        self.flights = Flights(StreamBook(), config.keep_outcomes_bytes)
        self.tokens = TokensService(instance, self.flights)
        self._announcer = Announcer(log, self._member)
        self._card: ModelCard | None = None
        self._text_digest = text_digest
        self._health = health
        self._stranger: str | None = None
        self._journal = JournalReader(log, config.pool, outcome=self._outcome, older=self.flights.older)
        self._cancels: set[asyncio.Task[None]] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        since_ms = self._clock() - (self._config.max_timeout_s + self._config.journal_margin_s) * 1000
        following = self.tasks.start(self._journal.follow(since_ms), name="journal", forever=True)
        await reached(self._journal.caught_up, following)
        self.tasks.start(self._journal.read_older(), name="older journal")
        if self._health is not None:
            self.tasks.start(self._watch(self._health), name="silence of the log", forever=True)
        await self._announcer.start()

    async def stop(self) -> None:
        """Says that it leaves, and ends what runs here. Requests go on without it."""
        await self._announcer.stop()
        if self._cancels:
            _, left = await asyncio.wait(self._cancels, timeout=self._config.append_timeout_s)
            for cancel in left:
                cancel.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        await super().stop()

    @property
    def model(self) -> ServedModel:
        """Raises ApiError (503) before a worker has said what it serves."""
        card = self._model_card()
        if card is None:
            raise unavailable("no worker has said yet which model it serves", "not_ready")
        return ServedModel(card.name, card.max_model_len, card.vocab_size, card.eos_token_ids, card.created)

    @property
    def ready(self) -> bool:
        return self.unready is None

    @property
    def unready(self) -> str | None:
        if not self._journal.caught_up.is_set():
            return "the journal has not been read to its end yet"
        silent = None if self._health is None else self._health.trouble(self._clock())
        if silent is not None:
            return silent
        if self._model_card() is not None:
            return None
        return self._stranger or "no worker has said yet which model it serves"

    def _model_card(self) -> ModelCard | None:
        """The least of what the pool's workers serve; the last that was known where none is there."""
        workers = self._directory.of(MemberKind.WORKER, pool=self._config.pool)
        cards = [worker.model for worker in workers if worker.model is not None]
        ours = [card for card in cards if self._text_digest in (None, card.text_digest)]
        if ours:
            self._card = min(ours, key=lambda card: card.max_model_len)
        elif cards:
            self._stranger = (
                f"the pool's workers serve {cards[0].name}, whose tokenizer is another than the one here; start the "
                "gateway with the same --model"
            )
        return self._card

    def _member(self) -> Member:
        return Member(
            member=MemberKind.GATEWAY,
            instance=self._instance,
            address=self.address,
            ttl_ms=self._config.ttl_ms,
            pool=self._config.pool,
        )

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Event]:
        """Tokens in order, then exactly one Finished. Raises before the first: InvalidRequest, Saturated, Conflict,
        ApiError (503)."""
        began = self._clock()
        flight = self.flights.get(request.request_id, request.digest)
        if flight is not None and not request.keyed:
            raise InvalidRequest(f"request {request.request_id!r} is running already", code="duplicate_request")
        if flight is None:
            if request.keyed and self._journal.reading_older:
                raise unavailable(
                    "the outcomes of earlier requests are being read: send this one again later, or without its "
                    "idempotency key",
                    "keys_not_read",
                    _OLDER_RETRY_S,
                )
            known = self.flights.known(request.request_id) if request.keyed else None
            if known is not None:
                for event in _from_outcome(known, request.digest):
                    yield event
                return
            flight = await self._send(request)
        if self._health is None or not self._health.silent(began):
            flight.doubt = None
        try:
            async for event in flight.events():
                if isinstance(event, Finished) and event.error == CONFLICT:
                    raise Conflict(CONFLICT)
                yield self._with_clocks(event, began, request) if isinstance(event, Finished) else event
        finally:
            # One with a key goes on without its client: a retry gets it.
            if flight.finished is None and not flight.keyed:
                self._give_up(flight, request)

    async def _send(self, request: GenerationRequest) -> Flight:
        self._check_depth()
        record = self._record(request)
        flight = self.flights.begin(request.request_id, request.digest, keyed=request.keyed)
        try:
            await self._log.append(
                REQUESTS,
                encode(record),
                key=request.request_id.encode(),
                headers=telemetry.inject(),
                timeout_s=self._config.append_timeout_s,
            )
        except AppendRefused as error:
            _LOG.warning("request %s can not be queued: %s", request.request_id, error)
            refused = InvalidRequest("the request is larger than can be queued here; shorten it", code="too_large")
            self.flights.disown(flight, refused)
            raise refused from error
        except (AppendNotSent, LogFailed) as error:
            _LOG.warning("request %s was not sent: %s", request.request_id, error)
            not_sent = unavailable(
                f"request {request.request_id} was not taken: the log does not take requests now; send it again later",
                "not_sent",
            )
            self.flights.disown(flight, not_sent)
            raise not_sent from error
        except AppendUnknown as error:
            if flight.finished is None and not self.flights.book.opened(request.request_id):
                unknown = _unknown(request)
                self._not_known(flight, request, unknown)
                raise unknown from error
        except BaseException:
            self._not_known(flight, request, _unknown(request))
            raise
        return flight

    async def cancel(self, request_id: str) -> None:
        """End a request, wherever it runs and whoever took it (CancelsById). Raises ApiError (503) where the log did
        not take the cancel, or did not say so."""
        self.tokens.hint_cancel(request_id)
        deadline_ms = int(self._clock() + self._config.max_timeout_s * 1000)
        try:
            await self._cancel(request_id, deadline_ms, "it was cancelled")
        except AppendUnknown as error:
            raise unavailable(
                f"request {request_id} may or may not be cancelled: the log did not answer", "unknown_acknowledgement"
            ) from error
        except LogError as error:
            _LOG.warning("the cancel of request %s was not sent: %s", request_id, error)
            raise unavailable(
                f"request {request_id} was not cancelled: the log takes nothing now; cancel it again later", "not_sent"
            ) from error

    def _not_known(self, flight: Flight, request: GenerationRequest, why: ApiError) -> None:
        """Rule 8. Under a key a retry sends it again, and whichever lands first is the request. Until then what has
        landed runs without a stream."""
        if request.keyed:
            self.flights.disown(flight, why)
        else:
            self._give_up(flight, request)

    def _give_up(self, flight: Flight, request: GenerationRequest) -> None:
        """Its client has gone, or was told that it is unknown: a cancel goes the request's own way (rule 9)."""
        self.flights.forget(flight)
        self.tokens.hint_cancel(flight.request_id)
        work = self._cancel_for_certain(request.request_id, self._deadline(request))
        if len(self._cancels) >= _MOST_CANCELS:
            work.close()
            self.flights.book.disown(flight.request_id)
            return
        task = asyncio.create_task(work, name=f"cancel {flight.request_id}")
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _cancel_for_certain(self, request_id: str, deadline_ms: int) -> None:
        """Until it is acknowledged, or is of no more use. Until then workers are told that the request has ended, and
        where the cancel did not come they would begin it again and again."""
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
        self.flights.book.disown(request_id)

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

    def _record(self, request: GenerationRequest) -> Request:
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

    def _deadline(self, request: GenerationRequest) -> int:
        timeout_s = min(request.timeout_s or self._config.default_timeout_s, self._config.max_timeout_s)
        return int(self._clock() + timeout_s * 1000)

    def _check_depth(self) -> None:
        """Rule 8: refused before it is accepted. From what the pool's scheduler last said, which is up to a quarter of
        a second old, or from how many of this gateway's own wait, whichever is more."""
        depths = [
            member.depth
            for member in self._directory.of(MemberKind.SCHEDULER, pool=self._config.pool)
            if member.depth is not None
        ]
        if not depths:
            return  # nobody schedules now; what is accepted waits for whoever takes over
        depth = max(depths, key=lambda depth: depth.waiting)
        waiting = max(depth.waiting, self.flights.book.unopened)
        if waiting >= depth.limit:
            raise Saturated(f"{waiting} requests wait, as many as may", retry_after_s=max(1.0, depth.wait_ms / 1000))

    def _with_clocks(self, end: Finished, began: float, request: GenerationRequest) -> Finished:
        """An end that has come too early by the clock here says that the clocks differ. Under a key it may be another
        call's, which had begun before: there the log's stamps must say so too."""
        now = self._clock()
        timeout_ms = self._deadline(request) - now
        skewed = self._health is not None and self._health.skew is not Skew.FINE
        if end.reason is not FinishReason.EXPIRED or not expired_early(began, timeout_ms, now):
            return end
        if request.keyed and not skewed:
            return end
        message = (
            f"it was ended as expired {told_ms(now - began)} after it came, of {told_ms(timeout_ms)} that it had: the "
            "clocks of the gateway and the scheduler differ"
        )
        if self._health is not None and skewed:
            message += f" ({self._health.told_skew()})"
        return dataclasses.replace(end, error=message)

    async def _watch(self, health: LogHealth) -> None:
        """While the log is silent no outcome is read: what has come to its end hangs no client for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = self._clock()
            if health.silent(now):
                self.flights.doubt(now, self._config.quiet_s * 1000, _no_outcome())
            else:
                self.flights.trust()

    # -- the journal ---------------------------------------------------------------------------------------------

    def _outcome(self, outcome: Outcome) -> None:
        self.flights.outcome(outcome)
        self.tokens.ended(outcome.request_id)

    @property
    def journal_unreadable(self) -> int:
        """Records of the journal that could not be read and were passed over."""
        return self._journal.unreadable


def _unknown(request: GenerationRequest) -> ApiError:
    return unavailable(
        f"request {request.request_id} may or may not have been taken: the log did not answer",
        "unknown_acknowledgement",
    )


def _no_outcome() -> ApiError:
    return unavailable(
        "the log does not answer, so how this request ends can not be told: send it again later; under an idempotency "
        "key that finds its outcome",
        "outcome_unknown",
        5.0,
    )


def _from_outcome(data: bytes, digest: bytes) -> list[Event]:
    outcome: Outcome = decode(data, Outcome)
    if outcome.digest != digest:
        raise Conflict(CONFLICT)
    completed = outcome.reason in (FinishReason.STOP, FinishReason.LENGTH)
    tokens = unpack_tokens(outcome.token_ids, outcome.logprobs) if completed else []
    return [*tokens, as_finished(outcome)]
