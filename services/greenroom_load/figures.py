"""The figures of a run. Names and definitions are those of vLLM's serving benchmark, where it has them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from greenroom_load.reply_record import Record
from greenroom_load.runner import Outcome
from greenroom_load.targets import Targets

PERCENTILES = (50, 90, 95, 99)
FEW_SAMPLES = 100
"""Percentiles of fewer are marked: a p99 of 20 samples is their largest one."""
LATE_S = 0.010
"""Sent so much later than intended counts as late."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds; all NaN where there are no samples."""

    n: int
    mean: float
    median: float
    std: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, seconds: Iterable[float | None]) -> Spread:
        """Of those that are not None."""
        values = np.array([value for value in seconds if value is not None], np.float64) * 1e3
        if not len(values):
            return cls(0, math.nan, math.nan, math.nan, dict.fromkeys(PERCENTILES, math.nan))
        percentiles = dict(zip(PERCENTILES, map(float, np.percentile(values, PERCENTILES)), strict=True))
        return cls(len(values), float(values.mean()), percentiles[50], float(values.std()), percentiles)

    @property
    def few(self) -> bool:
        return 0 < self.n < FEW_SAMPLES


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of the requests that ended well. ``ttft`` and ``e2el`` count from when a request was sent, as in vLLM;
    ``ttft_intended`` and ``e2el_intended`` from when it was to be sent, so that waiting at the client counts."""

    ttft: Spread
    tpot: Spread
    itl: Spread
    e2el: Spread
    ttft_intended: Spread
    e2el_intended: Spread

    @classmethod
    def of(cls, records: Sequence[Record]) -> Latencies:
        ok = [record for record in records if record.ok]
        return cls(
            ttft=Spread.of(record.ttft_s for record in ok),
            tpot=Spread.of(record.tpot_s for record in ok),
            itl=Spread.of(gap for record in ok for gap in record.gaps_s),
            e2el=Spread.of(record.e2e_s for record in ok),
            ttft_intended=Spread.of(record.ttft_intended_s for record in ok),
            e2el_intended=Spread.of(record.e2e_intended_s for record in ok),
        )

    def named(self) -> dict[str, Spread]:
        names = ("ttft", "tpot", "itl", "e2el", "ttft_intended", "e2el_intended")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Requests counted together. ``failures`` by label. ``with_targets``: those that had targets, ``met``: those of
    them that kept to all; a failed request has not. ``checked``: replies whose right answer is known.
    ``approximated``: the share of the routing that was, mean of the replies that say it, None where none does."""

    requests: int
    completed: int
    failures: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    latencies: Latencies
    with_targets: int
    met: int
    checked: int
    right: int
    approximated: float | None = None

    @classmethod
    def of(cls, records: Sequence[Record]) -> Group:
        ok = [record for record in records if record.ok]
        aimed = [(record, record.targets) for record in records if record.targets is not None]
        checked = [record.right for record in ok if record.right is not None]
        shares = [record.approximated for record in ok if record.approximated is not None]
        failures = Counter(record.failure.label for record in records if record.failure is not None)
        return cls(
            requests=len(records),
            completed=len(ok),
            failures=dict(failures.most_common()),
            input_tokens=sum(record.prompt_tokens or 0 for record in ok),
            output_tokens=sum(record.output_tokens for record in ok),
            latencies=Latencies.of(records),
            with_targets=len(aimed),
            met=sum(record.met(targets) for record, targets in aimed),
            checked=len(checked),
            right=sum(checked),
            approximated=sum(shares) / len(shares) if shares else None,
        )

    @property
    def failed(self) -> int:
        return self.requests - self.completed

    @property
    def attainment(self) -> float | None:
        return self.met / self.with_targets if self.with_targets else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """``good``: requests that met ``goodput``'s targets; None where none were given. Rates marked "while sending" leave
    the drain out: that is what the server did while it was under load.

    ``finished_late_half`` and ``sent_late_half``: requests that ended well, and that were to be sent, in the second
    half of the sending time.
    """

    whole: Group
    by_task: Mapping[str, Group]
    duration_s: float
    sending_s: float
    goodput: Targets | None
    good: int | None
    lateness: Spread
    late: int
    loop_lag: Spread
    cpu_share: float
    peak_in_flight: int
    mean_in_flight: float
    peak_tokens_per_s: float
    finished_while_sending: int
    tokens_while_sending: int
    sent_late_half: int
    finished_late_half: int
    repeats: int
    tokens_counted: int
    gaps_of_zero: int

    @property
    def offered_rate(self) -> float:
        """Requests a second that were to be sent."""
        return _per_second(self.whole.requests, self.sending_s)

    @property
    def request_throughput(self) -> float:
        return _per_second(self.whole.completed, self.duration_s)

    @property
    def request_goodput(self) -> float | None:
        return None if self.good is None else _per_second(self.good, self.duration_s)

    @property
    def output_throughput(self) -> float:
        return _per_second(self.whole.output_tokens, self.duration_s)

    @property
    def total_token_throughput(self) -> float:
        return _per_second(self.whole.output_tokens + self.whole.input_tokens, self.duration_s)

    @property
    def request_throughput_while_sending(self) -> float:
        return _per_second(self.finished_while_sending, self.sending_s)

    @property
    def output_throughput_while_sending(self) -> float:
        return _per_second(self.tokens_while_sending, self.sending_s)


def figures(outcome: Outcome, goodput: Targets | None = None) -> Figures:
    """All figures of a run."""
    records = outcome.records
    sent = [record for record in records if record.sent_s is not None]
    late = [record.late_s for record in sent if record.late_s is not None]
    half, end = outcome.sending_s / 2, outcome.sending_s
    ended = [record.end_s for record in records if record.ok and record.end_s is not None]
    tokens = token_times(records)
    return Figures(
        whole=Group.of(records),
        by_task=_by(records, lambda record: record.task or "-"),
        duration_s=outcome.duration_s,
        sending_s=outcome.sending_s,
        goodput=goodput,
        good=None if goodput is None else sum(record.met(goodput) for record in records),
        lateness=Spread.of(late),
        late=sum(by > LATE_S for by in late),
        loop_lag=Spread.of(outcome.lags_s),
        cpu_share=outcome.cpu_share,
        peak_in_flight=outcome.peak_in_flight,
        mean_in_flight=_per_second(
            sum(record.end_s - record.sent_s for record in sent if record.end_s and record.sent_s is not None),
            outcome.duration_s,
        ),
        peak_tokens_per_s=float(np.bincount(tokens.astype(np.int64)).max()) if len(tokens) else 0.0,
        finished_while_sending=sum(at <= end for at in ended),
        tokens_while_sending=int((tokens <= end).sum()),
        sent_late_half=sum(half < record.intended_s <= end for record in records),
        finished_late_half=sum(half < at <= end for at in ended),
        repeats=sum(record.repeat for record in records),
        tokens_counted=sum(record.tokens_counted for record in records if record.ok),
        gaps_of_zero=sum(gap == 0 for record in records if record.ok for gap in record.gaps_s),
    )


def token_times(records: Iterable[Record]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """When each token came, in seconds since the start. A part that brings several counts for all of them, as far as
    can be known: tokens of a reply are spread over its parts evenly."""
    times: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    for record in records:
        if record.first_s is None or not record.output_tokens:
            continue
        parts = record.first_s + np.concatenate([[0.0], np.cumsum(record.gaps_s)])
        times.append(parts[np.arange(record.output_tokens) * len(parts) // record.output_tokens])
    return np.concatenate(times) if times else np.zeros(0)


def _by(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, Group]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return {name: Group.of(own) for name, own in sorted(found.items())}


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
