"""What a worker runs, and for which scheduler: the worker's side of the protocol, as a state machine without I/O.

docs/architecture/protocol.md has the rules by number; the comments here name them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from greenroom.core.attempts import Attempt
from greenroom.core.errors import GreenroomError
from greenroom.core.generation import Finished, Token
from greenroom.core.messages import Task


@dataclass(frozen=True, slots=True)
class Caller:
    """A scheduler that calls: the epoch that it says it holds, and of which journal. ``named``: whether ``members``
    names it as a scheduler of this worker's pool. A name that it does not say is empty."""

    epoch: int
    scheduler: str = ""
    journal: str = ""
    named: bool = False


class Refusal(Enum):
    """Why a worker does not take a run."""

    STALE = "stale"
    """Of an epoch or an attempt that is over."""
    DRAINING = "draining"
    FULL = "full"


class RunRefused(GreenroomError):
    """The run was not taken, and nothing changed. It does not count as an attempt (rule 5)."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Open:
    """Open the request's token stream at its gateway. The answer comes as ``opened``, ``unwanted`` or ``no_stream``."""

    request_id: str
    attempt: Attempt
    reply_to: str | None


@dataclass(frozen=True, slots=True)
class Start:
    """Generate behind the forced ``prefix``. What is generated comes back with ``number``."""

    number: int
    task: Task
    prefix: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Generate no more of ``number``. Later tokens of it are passed over, and nothing is to be learnt from it.

    ``for_nothing``: nobody has had, or will have, what it generated."""

    number: int
    for_nothing: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Send the tokens on the request's stream."""

    request_id: str
    attempt: Attempt
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the scheduler that called under this attempt what ``number`` came to. The result is kept until ``cancel`` or
    the grace period's end."""

    number: int
    request_id: str
    attempt: Attempt
    finished: Finished
    tokens: tuple[Token, ...]


class Closing(Enum):
    """Why a run, or an attempt's hold on it, is over without a result of its own."""

    SUPERSEDED = "superseded"
    """A higher attempt has attached to it."""
    RELEASED = "released"
    """Its outcome is known, or it was cancelled."""
    UNWANTED = "unwanted"
    """Its gateway does not want it. The scheduler will read the reason in the log."""
    GIVEN_BACK = "given back"
    """The worker stops."""
    FORGOTTEN = "forgotten"
    """No call waited for it within the grace period."""


@dataclass(frozen=True, slots=True)
class Close:
    """The run is over under this attempt: its stream and its call end."""

    request_id: str
    attempt: Attempt
    why: Closing


Effect = Open | Start | Stop | Emit | Report | Close


class _Stream(Enum):
    """What is known of the request's gateway under the present attempt."""

    OPENING = "opening"
    OPEN = "open"
    NONE = "none"


@dataclass(slots=True, eq=False)
class Run:
    """One request here. ``number``: of its present generation. ``wanted``: whether that fits what its gateway has
    said, under this attempt or an earlier one, or there is certainly no gateway.

    ``sent``: how many of ``tokens`` its gateway has, or was sent. ``alone_since``: since when no scheduler's call
    waits for it.
    """

    task: Task
    attempt: Attempt
    number: int
    wanted: bool = False
    tokens: list[Token] = field(default_factory=list)
    sent: int = 0
    nbytes: int = 0
    """Of its inputs, where it has any."""
    stream: _Stream = _Stream.OPENING
    finished: Finished | None = None
    reported: bool = False
    alone_since: float | None = None

    @property
    def request_id(self) -> str:
        return self.task.request.request_id


class RunTable:
    """All runs of a worker, by request. Times are milliseconds on the worker's own monotonic clock.

    ``grace_ms``: how long a run outlives its scheduler's call. ``max_runs``: how many runs there may be, finished ones
    that wait to be released included. ``max_bytes``: of the inputs of all runs together, though a run that is alone may
    have more; None: any.

    A run generates from its call on. What it generates stays here until the gateway has answered (rule 6).

    Invariants, checked by ``audit``: one run a request, however often it is called; nothing is reported before the
    gateway has answered; nothing is emitted before that either, without a lease, or under an attempt that is not the
    run's.
    """

    def __init__(self, *, grace_ms: float, max_runs: int, max_bytes: int | None = None) -> None:
        self.epoch = -1
        self.journal = ""
        """The journal that ``epoch`` is of; empty before a scheduler has said it."""
        self.scheduler = ""
        """The scheduler that holds ``epoch``; empty where it has not said its name."""
        self.draining = False
        self.runs: dict[str, Run] = {}
        self.input_bytes = 0
        """Of all runs."""
        self.generated = 0
        """Tokens that were generated for runs that are wanted, since the start."""
        self._grace_ms = grace_ms
        self._max_runs = max_runs
        self._max_bytes = max_bytes
        self._lease_until = -1.0
        self._numbers = itertools.count()
        self._by_number: dict[int, Run] = {}

    # -- the scheduler -------------------------------------------------------------------------------------------

    def meet(self, caller: Caller, now: float) -> list[Effect]:
        """Every call of a scheduler begins with this, and is then served under its epoch. Raises RunRefused; then
        nothing has changed.

        A higher epoch is taken only from a scheduler that ``members`` names, or that holds the present epoch. Otherwise
        any caller could depose the scheduler for good. Epochs of two journals do not compare. So another journal is
        refused while there is a lease; without a lease everything begins anew under it.
        """
        known = caller.named or (caller.scheduler != "" and caller.scheduler == self.scheduler)
        effects: list[Effect] = []
        if caller.journal and self.journal and caller.journal != self.journal:
            if not caller.named:
                raise RunRefused(Refusal.STALE, f"no scheduler {caller.scheduler!r} of this pool is known here")
            if self.holds_lease(now):
                raise RunRefused(Refusal.STALE, f"this worker has a lease under the journal {self.journal}")
            effects = [effect for run in list(self.runs.values()) for effect in self._drop(run, Closing.FORGOTTEN)]
        elif caller.epoch < self.epoch:
            raise RunRefused(Refusal.STALE, f"epoch {caller.epoch} is over: this worker serves {self.epoch}")
        elif caller.epoch == self.epoch:
            self.journal = self.journal or (caller.journal if known else "")
            return []
        elif not known:
            raise RunRefused(Refusal.STALE, f"no scheduler {caller.scheduler!r} of this pool is known here")
        self.epoch, self.scheduler = caller.epoch, caller.scheduler
        self.journal = caller.journal or self.journal
        return effects

    def renew(self, epoch: int, until: float, now: float) -> list[Effect]:
        """The lease runs to ``until`` (rule 12). Raises RunRefused for an epoch that is over."""
        self._check_epoch(epoch)
        flush = now >= self._lease_until
        self._lease_until = max(until, self._lease_until) if not flush else until
        if not flush:
            return []
        return [effect for run in self.runs.values() for effect in self._flush(run, now)]

    def holds_lease(self, now: float) -> bool:
        return now < self._lease_until

    def list_runs(self, epoch: int) -> list[tuple[str, Attempt, bool]]:
        """Request, attempt, whether it is finished. Raises RunRefused for an epoch that is over."""
        self._check_epoch(epoch)
        return [(run.request_id, run.attempt, run.finished is not None) for run in self.runs.values()]

    def call(self, epoch: int, attempt: Attempt, task: Task) -> list[Effect]:
        """Start a run, or attach to the one that exists (rule 3). Raises RunRefused; then nothing has changed."""
        self._check_epoch(epoch)
        run = self.runs.get(task.request.request_id)
        if run is not None:
            if attempt < run.attempt:
                raise RunRefused(Refusal.STALE, f"attempt {attempt} is over: it runs as {run.attempt}")
            return self._attach(run, attempt)
        if self.draining:
            raise RunRefused(Refusal.DRAINING, "this worker is stopping")
        if len(self.runs) >= self._max_runs:
            raise RunRefused(Refusal.FULL, f"{len(self.runs)} runs are here, as many as may be")
        nbytes = task.input_bytes
        if nbytes and self.input_bytes and self._max_bytes is not None and self.input_bytes + nbytes > self._max_bytes:
            raise RunRefused(Refusal.FULL, f"inputs of {self.input_bytes} bytes are here; this one has {nbytes} more")
        run = self.runs[task.request.request_id] = Run(task, attempt, next(self._numbers), nbytes=nbytes)
        self._by_number[run.number] = run
        self.input_bytes += nbytes
        return [Open(run.request_id, attempt, task.request.reply_to), Start(run.number, task, ())]

    def _attach(self, run: Run, attempt: Attempt) -> list[Effect]:
        """From now on the run is this attempt's. Its gateway, which takes tokens of the highest attempt only, is asked
        anew."""
        run.alone_since = None
        if attempt == run.attempt:
            return self._report(run)
        old, run.attempt = run.attempt, attempt
        run.stream, run.reported = _Stream.OPENING, False
        return [
            Close(run.request_id, old, Closing.SUPERSEDED),
            Open(run.request_id, attempt, run.task.request.reply_to),
        ]

    def hung_up(self, request_id: str, attempt: Attempt, now: float) -> None:
        """The scheduler's call under this attempt has broken: the run goes on for the grace period."""
        run = self.runs.get(request_id)
        if run is not None and run.attempt == attempt:
            run.alone_since = now

    def cancel(self, request_id: str, attempt: Attempt) -> list[Effect]:
        """End the run, or release its result, if it is of this attempt or a lower one; by the scheduler, or by a
        gateway's hint (rule 9)."""
        run = self.runs.get(request_id)
        return [] if run is None or run.attempt > attempt else self._drop(run, Closing.RELEASED)

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise RunRefused(Refusal.STALE, f"epoch {epoch} is not the one that this worker serves: {self.epoch}")

    # -- the gateway ---------------------------------------------------------------------------------------------

    def opened(self, request_id: str, attempt: Attempt, delivered: Sequence[Token], now: float) -> list[Effect]:
        """The gateway has bound the request to this attempt, and its client has had ``delivered`` (rule 6)."""
        run = self._opening(request_id, attempt)
        if run is None:
            return []
        run.stream, run.sent = _Stream.OPEN, len(delivered)
        if _starts_with(run.tokens, delivered):
            self._want(run)
            return self._flush(run, now)
        return self._begin_anew(run, tuple(delivered))

    def no_stream(self, request_id: str, attempt: Attempt) -> list[Effect]:
        """No gateway waits for the tokens: it has certainly gone, or says so. Go on without a stream."""
        run = self.runs.get(request_id)
        if run is None or run.attempt != attempt or run.stream is _Stream.NONE:
            return []
        run.stream = _Stream.NONE
        self._want(run)
        return self._report(run)

    def unwanted(self, request_id: str, attempt: Attempt) -> list[Effect]:
        """The gateway has bound a higher attempt, or its client has had the end: the run is of no use."""
        run = self.runs.get(request_id)
        return [] if run is None or run.attempt != attempt else self._drop(run, Closing.UNWANTED)

    def stream_broken(self, request_id: str, attempt: Attempt) -> list[Effect]:
        """What was sent may be lost: ask the gateway anew, under the same attempt."""
        run = self.runs.get(request_id)
        if run is None or run.attempt != attempt or run.stream is _Stream.NONE:
            return []
        run.stream = _Stream.OPENING
        return [Open(request_id, attempt, run.task.request.reply_to)]

    def _opening(self, request_id: str, attempt: Attempt) -> Run | None:
        run = self.runs.get(request_id)
        if run is None or run.attempt != attempt or run.stream is not _Stream.OPENING:
            return None
        return run

    # -- what generates ------------------------------------------------------------------------------------------

    def token(self, number: int, token: Token, now: float) -> Emit | None:
        """The next token of what was started as ``number``."""
        run = self._by_number.get(number)
        if run is None:
            return None
        run.tokens.append(token)
        self.generated += run.wanted
        if run.stream is not _Stream.OPEN or now >= self._lease_until:
            return None
        return self._emit(run)

    def ended(self, number: int, finished: Finished, now: float) -> list[Effect]:
        """What was started as ``number`` has come to its end."""
        run = self._by_number.get(number)
        if run is None:
            return []
        run.finished = finished
        return self._flush(run, now)

    # -- time, and the end ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Effect]:
        """Drop the runs that no call has waited for during the grace period. A run whose call was answered counts from
        then on, since its release may be lost."""
        for run in self.runs.values():
            if run.reported and run.alone_since is None:
                run.alone_since = now
        late = [
            run for run in self.runs.values() if run.alone_since is not None and now - run.alone_since >= self._grace_ms
        ]
        return [effect for run in late for effect in self._drop(run, Closing.FORGOTTEN)]

    def give_back(self) -> list[Effect]:
        """The worker stops: other workers go on with what is left."""
        self.draining = True
        return [effect for run in list(self.runs.values()) for effect in self._drop(run, Closing.GIVEN_BACK)]

    # -- within --------------------------------------------------------------------------------------------------

    def _want(self, run: Run) -> None:
        """What it has generated fits what its client has had, or nobody has had anything."""
        if not run.wanted:
            run.wanted = True
            self.generated += len(run.tokens)

    def _begin_anew(self, run: Run, prefix: tuple[Token, ...]) -> list[Effect]:
        former = run.number
        del self._by_number[former]
        run.number, run.wanted = next(self._numbers), True
        run.tokens, run.finished, run.reported = list(prefix), None, False
        self._by_number[run.number] = run
        return [Stop(former, for_nothing=True), Start(run.number, run.task, prefix)]

    def _flush(self, run: Run, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if run.stream is _Stream.OPEN and now < self._lease_until and run.sent < len(run.tokens):
            effects.append(self._emit(run))
        return effects + self._report(run)

    def _emit(self, run: Run) -> Emit:
        tokens = tuple(run.tokens[run.sent :])
        run.sent = len(run.tokens)
        return Emit(run.request_id, run.attempt, tokens)

    def _report(self, run: Run) -> list[Effect]:
        """Nothing is reported before the gateway has answered: the result must start with what its client has."""
        if run.finished is None or run.stream is _Stream.OPENING:
            return []
        run.reported = True
        return [Report(run.number, run.request_id, run.attempt, run.finished, tuple(run.tokens))]

    def _drop(self, run: Run, why: Closing) -> list[Effect]:
        del self.runs[run.request_id]
        self.input_bytes -= run.nbytes
        del self._by_number[run.number]
        closing = Close(run.request_id, run.attempt, why)
        if run.reported:
            return [closing]
        return [Stop(run.number, for_nothing=not run.wanted), closing]

    def audit(self) -> None:
        """Raises AssertionError, saying which, where an invariant does not hold."""
        assert {number: id(run) for number, run in self._by_number.items()} == {
            run.number: id(run) for run in self.runs.values()
        }, "every generation belongs to one run"
        assert self.input_bytes == sum(run.nbytes for run in self.runs.values()), "bytes are those of the runs"
        for run in self.runs.values():
            assert run.wanted or not (run.sent or run.reported), f"{run.request_id} was told before it was asked for"
            assert [token.index for token in run.tokens] == list(range(len(run.tokens))), "tokens without gap"


def _starts_with(tokens: Sequence[Token], delivered: Sequence[Token]) -> bool:
    if len(delivered) > len(tokens):
        return False
    return all(own.token_id == had.token_id for own, had in zip(tokens, delivered, strict=False))
