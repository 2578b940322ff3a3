"""What is heard of one reply while it comes, and the record that is left of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from greenroom_load.targets import Targets

clock = time.monotonic
"""The clock of all measured times; the event loop's too."""


class FailureKind(StrEnum):
    """How a request failed, coarsely; the reason beside it is the server's own word."""

    LIMITED = "429"
    """The server had no room for it, or a limit was exceeded."""
    REFUSED = "4xx"
    SERVER = "5xx"
    STREAM = "stream error"
    """The server said in the middle of the reply that it failed."""
    CUT = "stream cut"
    """The connection ended before the reply did."""
    TIMEOUT = "timeout"
    CONNECT = "no connection"
    BAD_REPLY = "bad reply"
    """What came is not what the API promises."""
    UNFINISHED = "unfinished"
    """It was running when the run ended, and was cancelled."""
    NOT_SENT = "not sent"
    """Its time came and it could not be sent: the generator's own bounds."""
    CLIENT = "client defect"


@dataclass(frozen=True, slots=True)
class Failure:
    """``reason``: a stable word; ``message``: for people; ``status``: HTTP's, or gRPC's name."""

    kind: FailureKind
    reason: str = ""
    message: str = ""
    status: str = ""
    retry_after_s: float | None = None

    @property
    def label(self) -> str:
        return f"{self.kind.value}: {self.reason}" if self.reason else self.kind.value


class Refused(Exception):
    """Raised by a transport for a request that did not end well."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.label)
        self.failure = failure


class Meter:
    """Counters over all requests, for whoever watches a run. They only rise, but for ``in_flight``."""

    __slots__ = ("failed", "finished", "gap_count", "gap_sum_s", "in_flight", "peak_in_flight", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.finished = 0
        self.failed = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.gap_count = 0
        self.gap_sum_s = 0.0


class Exchange:
    """One request under way; a transport tells it what it hears, with the time of the read that brought it.

    ``events`` are parts of a reply that bring text or tokens. Several that one read brings have the same time, so the
    gaps between them are 0.
    """

    __slots__ = ("_meter", "approximated", "completion_tokens", "end", "finish", "first", "gaps", "last", "pieces",
                 "prompt_tokens", "request_id")  # fmt: skip

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.request_id: str | None = None
        self.first: float | None = None
        self.last = 0.0
        self.end: float | None = None
        self.finish: str | None = None
        self.gaps: list[float] = []
        self.pieces: list[str] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.approximated: float | None = None

    def heard(self, text: str, at: float) -> None:
        """A part with text or tokens came."""
        if self.first is None:
            self.first = at
        else:
            gap = at - self.last
            self.gaps.append(gap)
            self._meter.gap_count += 1
            self._meter.gap_sum_s += gap
        self.last = at
        self.pieces.append(text)

    def ended(self, reason: str | None, at: float) -> None:
        """The last token came, or the word that there was none."""
        self.end = at
        self.finish = reason

    def used(self, prompt_tokens: int, completion_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens

    def routed(self, approximated: float) -> None:
        """The server says what share of its routing was approximated."""
        self.approximated = approximated


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request and what became of it. Times are seconds since the run's start.

    ``intended_s``: when the arrival process wanted it sent; ``sent_s``: when it was (None: never). ``first_s``: the
    first part with text, or the end of a reply without any; ``end_s``: the last token, or when it failed. ``gaps_s``:
    between parts. ``tokens_counted``: the server gave no count, so parts are counted instead. ``approximated``: the
    share of its routing that was, None where the server does not say.
    """

    index: int
    intended_s: float
    sent_s: float | None
    first_s: float | None = None
    end_s: float | None = None
    gaps_s: Sequence[float] = ()
    task: str | None = None
    prompt_name: str | None = None
    request_id: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    tokens_counted: bool = False
    approximated: float | None = None
    finish: str | None = None
    text: str = ""
    expected: str | None = None
    repeat: bool = False
    targets: Targets | None = None
    failure: Failure | None = None

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def late_s(self) -> float | None:
        """How much later than intended it was sent."""
        return None if self.sent_s is None else self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.sent_s is None or self.first_s is None else self.first_s - self.sent_s

    @property
    def ttft_intended_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.sent_s is None or self.end_s is None else self.end_s - self.sent_s

    @property
    def e2e_intended_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token behind the first one; None for a reply of one token."""
        if self.first_s is None or self.end_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    @property
    def right(self) -> bool | None:
        """Whether the reply is the expected one, to the letter; None where it is not known, or did not end well."""
        return None if self.expected is None or not self.ok else self.text == self.expected

    def met(self, targets: Targets) -> bool:
        """Whether it ended well within the targets, from when it was to be sent: what its user felt."""
        if not self.ok or self.e2e_intended_s is None:
            return False
        return targets.met(self.ttft_intended_s, self.tpot_s or 0.0, self.e2e_intended_s)
