"""Requests on their way: what their clients have had, who waits for them, and how they ended. No I/O."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from greenroom.core.errors import Conflict
from greenroom.core.generation import Event, Finished, FinishReason, Token
from greenroom.core.logprobs import unpack_tokens
from greenroom.core.messages import Outcome, encode
from greenroom.gateway.requests.stream_book import Diverged, StreamBook


@dataclass(slots=True, eq=False)
class Flight:
    """One request that was sent on its way from here. ``tokens``: all that its client may have had."""

    request_id: str
    digest: bytes
    keyed: bool
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None
    failure: Exception | None = None
    doubt: Exception | None = None
    """Why its end can not be told now, though it may be later."""
    quiet: tuple[int, float] = (-1, 0.0)
    """How many tokens it had when that was last looked at, and since when."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, tokens: Sequence[Token]) -> None:
        self.tokens += tokens
        self.changed.set()

    def finish(self, finished: Finished) -> None:
        self.finished = finished
        self.changed.set()

    def fail(self, error: Exception) -> None:
        """There will be no end of it here."""
        self.failure = error
        self.changed.set()

    async def events(self) -> AsyncIterator[Event]:
        """All of it from the beginning, as it comes. Raises what ``fail`` was told, and ``doubt``."""
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


def as_finished(outcome: Outcome, error: str | None = None) -> Finished:
    return Finished(
        outcome.reason if error is None else FinishReason.FAILED,
        outcome.prompt_tokens,
        len(outcome.token_ids),
        error if error is not None else (outcome.message or None),
        outcome.queue_ms / 1000,
        outcome.approximated,
    )


class Flights:
    """All requests that were sent on their way from here, and the outcomes of keyed ones, wherever they came from.

    ``keep``: how many bytes of outcomes are kept; the oldest go first.
    """

    def __init__(self, book: StreamBook, keep_bytes: int) -> None:
        self.book = book
        self._keep_bytes = keep_bytes
        self._flights: dict[str, Flight] = {}
        self._outcomes: OrderedDict[str, bytes] = OrderedDict()
        self._older: OrderedDict[str, bytes] = OrderedDict()
        """Those from before the journal was followed: the first to go."""
        self._kept = 0
        self.dropped = 0
        """Outcomes of keyed requests that were given up for room before their retention was over."""

    def __len__(self) -> int:
        return len(self._flights)

    def get(self, request_id: str, digest: bytes) -> Flight | None:
        """The flight of that id. Raises Conflict where it is of something else."""
        flight = self._flights.get(request_id)
        if flight is not None and flight.digest != digest:
            raise _conflict()
        return flight

    def begin(self, request_id: str, digest: bytes, *, keyed: bool) -> Flight:
        self.book.expect(request_id)
        flight = self._flights[request_id] = Flight(request_id, digest, keyed)
        return flight

    def forget(self, flight: Flight) -> None:
        """Nobody waits for it any more, and a cancel follows."""
        if self._flights.get(flight.request_id) is flight:
            del self._flights[flight.request_id]
            self.book.forget(flight.request_id)

    def disown(self, flight: Flight, why: Exception) -> None:
        """Nobody waits for it any more: who joined it is told ``why``. Where it was taken it goes on (rule 8)."""
        if self._flights.get(flight.request_id) is flight:
            del self._flights[flight.request_id]
            self.book.disown(flight.request_id)
            flight.fail(why)

    def doubt(self, now: float, after_ms: float, why: Exception) -> None:
        """The log is silent, so no outcome comes: who waits for a request that had no token for ``after_ms`` is told
        ``why``. To be called now and then, until ``trust``."""
        for flight in self._flights.values():
            had, since = flight.quiet
            if had != len(flight.tokens):
                flight.quiet = (len(flight.tokens), now)
            elif now - since >= after_ms and flight.doubt is None:
                flight.doubt = why
                flight.changed.set()

    def trust(self) -> None:
        """The log answers: outcomes come."""
        for flight in self._flights.values():
            flight.doubt, flight.quiet = None, (-1, 0.0)

    def delivered(self, request_id: str, tokens: Sequence[Token]) -> None:
        """New tokens that the book has let through."""
        self._flights[request_id].add(tokens)

    def outcome(self, outcome: Outcome) -> None:
        """An outcome that counts. Of a request the first; what follows is passed over here."""
        if outcome.keyed and self.known(outcome.request_id) is None:
            self._keep(outcome, self._outcomes)
        flight = self._flights.pop(outcome.request_id, None)
        if flight is None:
            return
        if flight.digest != outcome.digest and outcome.digest:
            # Under one key something else was asked elsewhere, and it came first.
            self.book.forget(outcome.request_id)
            flight.finish(Finished(FinishReason.FAILED, 0, 0, CONFLICT))
            return
        try:
            flight.tokens += self.book.end(outcome, unpack_tokens(outcome.token_ids, outcome.logprobs))
            flight.finish(as_finished(outcome))
        except Diverged as error:
            flight.finish(as_finished(outcome, str(error)))

    def older(self, outcome: Outcome) -> None:
        """An outcome that counts, from before all that ``outcome`` was told, in the journal's order. No request that
        is on its way is ended by it."""
        if not outcome.keyed or outcome.request_id in self._older:
            return
        later = self._outcomes.pop(outcome.request_id, None)
        self._kept -= len(later or b"")
        self._keep(outcome, self._older)

    def known(self, request_id: str) -> bytes | None:
        """The outcome of a keyed request, encoded, where it is kept."""
        return self._older.get(request_id) or self._outcomes.get(request_id)

    def _keep(self, outcome: Outcome, among: OrderedDict[str, bytes]) -> None:
        data = encode(outcome)
        among[outcome.request_id] = data
        self._kept += len(data)
        while self._kept > self._keep_bytes:
            _, oldest = (self._older or self._outcomes).popitem(last=False)
            self._kept -= len(oldest)
            self.dropped += 1


CONFLICT = "this idempotency key was used for another request"


def _conflict() -> Conflict:
    return Conflict(f"{CONFLICT}; use a new key for a new request")
