"""The table of requests that were sent from here and have not ended, and how keyed ones ended. No I/O."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from greenroom.core.errors import Conflict
from greenroom.core.generation import Event, Finished, FinishReason, Token
from greenroom.core.logprobs import unpack, unpack_tokens
from greenroom.core.messages import Outcome
from greenroom.gateway.errors import ApiError
from greenroom.gateway.pipeline.idempotency_outcomes import COMPLETED, KeptOutcomes
from greenroom.gateway.pipeline.stream_book import Delivery, Diverged, StreamBook, Unwanted


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request from before it is appended to the log until its end is known. Any number of clients read it.

    ``delivery``: its tokens, which the stream book adds to. ``finished`` or ``failure`` is its end here.
    """

    request_id: str
    digest: bytes
    keyed: bool
    delivery: Delivery
    deadline_ms: float
    append: asyncio.Task[None] | None = None
    """Sends it to the log. A cancel waits for its end, since it goes the request's own way (rule 9)."""
    cancelled: bool = False
    """Whether a cancel was acknowledged."""
    finished: Finished | None = None
    failure: Exception | None = None
    doubt: Exception | None = None
    """Why its end can not be told now, though it may be later."""
    quiet: tuple[int, float] = (-1, 0.0)
    """How many tokens it had when that was last looked at, and since when."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called once when it ends."""
    place_kept: bool = False
    bytes_kept: bool = False
    """Whether its place and the bytes of its inputs, which its call held, are among ``at_end``."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> Sequence[Token]:
        """All that its clients may have had."""
        return self.delivery.tokens

    def end(self, how: Finished | Exception) -> None:
        """Its outcome is known, or there will be none here."""
        if isinstance(how, Finished):
            self.finished = how
        else:
            self.failure = how
        self.changed.set()
        for call in self.at_end:
            call()
        self.at_end.clear()

    async def events(self) -> AsyncIterator[Event]:
        """All of it from the beginning, as it comes. Raises ``failure`` and ``doubt``."""
        given = 0
        while True:
            while given < len(self.tokens):
                given += 1
                yield self.tokens[given - 1]
            if self.finished is not None:
                yield self.finished
                return
            if self.failure is not None:
                raise self.failure
            if self.doubt is not None:
                raise self.doubt
            changed = self.changed
            await changed.wait()
            if changed is self.changed:
                self.changed = asyncio.Event()


class InFlightRequests:
    """Which requests are in flight, by id: their tokens (in ``book``), their readers, their ends.

    ``keep_bytes``: of outcomes of keyed requests, which are ``kept`` for a retry.
    """

    def __init__(self, book: StreamBook, keep_bytes: int) -> None:
        self.book = book
        self.kept = KeptOutcomes(keep_bytes)
        self._requests: dict[str, InFlightRequest] = {}
        self.keyed = 0
        """How many have an idempotency key, and so go on without their clients."""

    def __len__(self) -> int:
        return len(self._requests)

    def find(self, request_id: str) -> InFlightRequest | None:
        return self._requests.get(request_id)

    def join(self, request_id: str, digest: bytes) -> InFlightRequest | None:
        """The request of that id, None if none is in flight. Raises Conflict where it asks for something else."""
        request = self._requests.get(request_id)
        if request is not None and request.digest != digest:
            raise _conflict()
        return request

    def begin(
        self, request_id: str, digest: bytes, *, keyed: bool, deadline_ms: float = float("inf")
    ) -> InFlightRequest:
        """Call this before the request is sent. Raises ValueError where one of that id is in flight."""
        delivery = self.book.expect(request_id)
        request = self._requests[request_id] = InFlightRequest(request_id, digest, keyed, delivery, deadline_ms)
        self.keyed += keyed
        return request

    def add(self, request_id: str, stream: object, tokens: Sequence[Token]) -> Sequence[Token] | Unwanted:
        """Tokens from a worker; see StreamBook.add. Raises Gap, and then nothing was added."""
        new = self.book.add(request_id, stream, tokens)
        if new and not isinstance(new, Unwanted):
            self._requests[request_id].changed.set()
        return new

    def forget(self, request: InFlightRequest) -> bool:
        """Its client has gone, and a cancel follows. False where it was not in flight any more."""
        if not self._remove(request):
            return False
        self.book.forget(request.request_id)
        return True

    def disown(self, request: InFlightRequest, how: Finished | Exception) -> None:
        """Nobody waits for it any more: its readers are told ``how``. Where it was taken it goes on (rule 8)."""
        if self._remove(request):
            self.book.disown(request.request_id)
            request.end(how)

    def expire(self, now_ms: float, doubt: Exception | None = None) -> None:
        """Ends keyed requests whose deadline has passed without an outcome: there may be none. Call this now and then.

        ``doubt``: where outcomes can not be read now. Readers are told it then, since there may be an outcome. Requests
        without a key end with their clients' calls.
        """
        late = [request for request in self._requests.values() if request.keyed and now_ms > request.deadline_ms]
        for request in late:
            had = len(request.tokens)
            expired = Finished(FinishReason.EXPIRED, 0, had, "it did not end in the time that it had")
            self.disown(request, doubt or expired)

    def _remove(self, request: InFlightRequest) -> bool:
        if self._requests.get(request.request_id) is not request:
            return False
        del self._requests[request.request_id]
        self.keyed -= request.keyed
        return True

    def doubt(self, now: float, after_ms: float, why: Exception) -> None:
        """The log is silent, so no outcome comes: readers of a request that had no token for ``after_ms`` are told
        ``why``. Call this now and then until ``trust``."""
        for request in self._requests.values():
            had, since = request.quiet
            if had != len(request.tokens):
                request.quiet = (len(request.tokens), now)
            elif now - since >= after_ms and request.doubt is None:
                request.doubt = why
                request.changed.set()

    def trust(self) -> None:
        """The log answers: outcomes come."""
        for request in self._requests.values():
            request.doubt, request.quiet = None, (-1, 0.0)

    def outcome(self, outcome: Outcome) -> None:
        """An outcome that counts. The first of a request is its end; later ones change nothing."""
        self.kept.add(outcome)
        request = self._requests.get(outcome.request_id)
        if request is None:
            return
        self._remove(request)
        if request.digest != outcome.digest and outcome.digest:
            # Another gateway was asked for something else under the same key, and that request came first.
            self.book.forget(outcome.request_id)
            request.end(_conflict())
            return
        try:
            self.book.end(outcome, unpack_tokens(outcome.token_ids, outcome.logprobs))
            request.end(_finished(outcome))
        except Diverged as error:
            request.end(_finished(outcome, str(error)))

    def older(self, outcome: Outcome) -> None:
        """An outcome that counts, older than all that ``outcome`` is told, in the journal's order. It ends no request
        in flight."""
        self.kept.add_older(outcome)

    def known(self, request_id: str, digest: bytes) -> list[Event] | None:
        """All events of a request whose outcome is kept, None where it is not. Raises Conflict where that was another
        request, ApiError (409) where its answer was dropped to make room."""
        kept = self.kept.get(request_id)
        if kept is None:
            return None
        outcome = kept.outcome
        if outcome.digest and outcome.digest != digest:
            raise _conflict()
        if kept.answer_dropped:
            raise _answer_dropped()
        tokens = unpack_tokens(outcome.token_ids, outcome.logprobs) if outcome.reason in COMPLETED else []
        return [*tokens, _finished(outcome)]


def _finished(outcome: Outcome, error: str | None = None) -> Finished:
    asked = outcome.prompt_logprobs
    return Finished(
        outcome.reason if error is None else FinishReason.FAILED,
        outcome.prompt_tokens,
        len(outcome.token_ids),
        error if error is not None else (outcome.message or None),
        outcome.queue_ms / 1000,
        outcome.approximated,
        outcome.outputs,
        outcome.invalid,
        prompt_logprobs=None if asked is None else tuple(unpack(asked, outcome.prompt_tokens - 1)),
    )


def _conflict() -> Conflict:
    """For a second request under a key that asks for something else."""
    return Conflict("this idempotency key belongs to another request; send this one with a key of its own")


def _answer_dropped() -> ApiError:
    return ApiError(
        409,
        "the request of this idempotency key was answered, and the gateway has dropped the answer to make room; send "
        "it with a key of its own to have it answered anew",
        code="answer_dropped",
        param="idempotency-key",
    )
