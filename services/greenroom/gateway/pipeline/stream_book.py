"""Which tokens a gateway's clients have had, and which worker's stream may add to them. Pure: no I/O.

docs/architecture/protocol.md has the rules by number; the comments here name them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from greenroom.core.attempts import Attempt
from greenroom.core.generation import FinishReason, Token
from greenroom.core.messages import Outcome


class Unwanted(Enum):
    """Why a worker's stream for a request is turned away."""

    STALE = "stale"
    """A higher attempt, or a later stream of the same one, has it."""
    ENDED = "ended"
    """Its client has had its end, or has left and a cancel is on its way."""
    NO_STREAM = "no stream"
    """No client here waits for its tokens, but it has not ended: it goes on without a stream (rule 8)."""


_REMEMBERED = 16_384
"""How many ended requests are remembered. For an older one the answer is *no stream*, which costs its worker steps."""


class Gap(Exception):
    """Tokens are missing between what was delivered and what came: the worker must open its stream anew."""


class Diverged(Exception):
    """The outcome does not start with the tokens that the client has had, which must not be changed."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One request's tokens so far. ``stream``: the one worker's stream that may add to them."""

    tokens: list[Token] = field(default_factory=list)
    attempt: Attempt | None = None
    stream: object = None


class StreamBook:
    """The tokens of all requests that clients of this gateway wait for.

    Invariants: a client's tokens come in order, without gap or repeat. Tokens are only added, and none after the
    outcome. A worker is told that a request has ended only where that is known or a cancel follows: else the request
    would be run again and again until its deadline.
    """

    def __init__(self) -> None:
        self._deliveries: dict[str, Delivery] = {}
        self._unopened: set[str] = set()
        self._over: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._deliveries

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def unopened(self) -> int:
        """How many requests no worker has opened a stream for. They wait, or are on their way."""
        return len(self._unopened)

    def expect(self, request_id: str) -> Delivery:
        """A client waits for it. Call this before the request is sent. Raises ValueError if a client waits already."""
        if request_id in self._deliveries:
            raise ValueError(f"{request_id} is waited for already")
        delivery = self._deliveries[request_id] = Delivery()
        self._unopened.add(request_id)
        self._over.pop(request_id, None)
        return delivery

    def forget(self, request_id: str) -> None:
        """The client has its end, or has left and a cancel follows. A worker that opens it is told so."""
        self.disown(request_id)
        self._over[request_id] = None
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def disown(self, request_id: str) -> None:
        """No client waits for it any more, and no cancel follows. Where it was taken it goes on without a stream, and a
        retry under its key finds it (rule 8)."""
        self._deliveries.pop(request_id, None)
        self._unopened.discard(request_id)
        self._over.pop(request_id, None)

    def opened(self, request_id: str) -> bool:
        """Whether a worker has opened a stream for it. Then it was certainly taken."""
        return request_id in self._deliveries and request_id not in self._unopened

    def delivered(self, request_id: str) -> tuple[Token, ...]:
        return tuple(self._deliveries[request_id].tokens)

    def stream(self, request_id: str) -> object:
        """The worker's stream that may add to it. None where no worker has opened one, or no client waits."""
        delivery = self._deliveries.get(request_id)
        return None if delivery is None else delivery.stream

    def open(self, request_id: str, attempt: Attempt, stream: object) -> tuple[Token, ...] | Unwanted:
        """A worker opens a stream. Returns what the client has had; only this stream may add to it now (rules 5, 6)."""
        delivery = self._deliveries.get(request_id)
        if delivery is None:
            return self._nobody(request_id)
        if delivery.attempt is not None and attempt < delivery.attempt:
            return Unwanted.STALE
        delivery.attempt, delivery.stream = attempt, stream
        self._unopened.discard(request_id)
        return tuple(delivery.tokens)

    def add(self, request_id: str, stream: object, tokens: Sequence[Token]) -> Sequence[Token] | Unwanted:
        """Tokens from a worker. Returns those that are new to the client. Raises Gap, and then nothing was added."""
        delivery = self._deliveries.get(request_id)
        if delivery is None:
            return self._nobody(request_id)
        if delivery.attempt is None:
            raise Gap(f"{request_id} is waited for anew: its stream is to be opened again")
        if delivery.stream is not stream:
            return Unwanted.STALE
        had = len(delivery.tokens)
        new = [token for token in tokens if token.index >= had]
        if [token.index for token in new] != list(range(had, had + len(new))):
            raise Gap(f"{request_id} has {had} tokens; these start at {new[0].index}")
        delivery.tokens += new
        return new

    def end(self, outcome: Outcome, rest: Sequence[Token]) -> Sequence[Token]:
        """The outcome from the journal. ``rest``: all its tokens. Returns those that the client has not had.

        The request is forgotten. Raises Diverged, and KeyError for a request that no client waits for.
        """
        had = self._deliveries[outcome.request_id].tokens
        self.forget(outcome.request_id)
        if outcome.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return ()
        if [token.token_id for token in rest[: len(had)]] != [token.token_id for token in had]:
            raise Diverged(f"the outcome of {outcome.request_id} does not start with the {len(had)} tokens delivered")
        new = rest[len(had) :]
        had += new
        return new

    def _nobody(self, request_id: str) -> Unwanted:
        return Unwanted.ENDED if request_id in self._over else Unwanted.NO_STREAM
