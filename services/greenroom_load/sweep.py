"""Which rates a server sustains: the rates to try, and the rule by which one counts as sustained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greenroom.core.errors import InvalidConfig
from greenroom_load.figures import Figures
from greenroom_load.report import FORMAT, Report, clean
from greenroom_load.table import columns, number

GRACE = 2
"""Requests by which a step may fall behind whatever its size: so few are no queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rate is sustained if all of these hold:

    1. at most ``most_failed`` of the requests failed (shed ones too);
    2. of as many requests as were to be sent in the second half of the sending time, at least ``least_finished`` ended
       well in that half: so the queue did not grow (two requests' grace);
    3. where there is a goodput's targets, at least ``least_good`` of the requests met them.
    """

    most_failed: float = 0.01
    least_finished: float = 0.95
    least_good: float = 0.9

    def __post_init__(self) -> None:
        for name in ("most_failed", "least_finished", "least_good"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidConfig(name, getattr(self, name), "a share from 0 to 1")

    def broken(self, found: Figures) -> list[str]:
        """Why the rate was not sustained; empty if it was."""
        reasons = []
        whole = found.whole
        if not whole.completed:
            return ["not one request completed"]
        if whole.failed > self.most_failed * whole.requests:
            reasons.append(f"{whole.failed / whole.requests:.1%} failed")
        behind = found.sent_late_half * self.least_finished - found.finished_late_half
        if behind > GRACE:
            reasons.append(f"{found.finished_late_half} finished of {found.sent_late_half} in the second half")
        if found.good is not None and found.good < self.least_good * whole.requests:
            reasons.append(f"goodput {found.good / whole.requests:.0%}")
        return reasons

    def __str__(self) -> str:
        return (
            f"sustained: at most {self.most_failed:.0%} failed; in the second half of the sending time at least "
            f"{self.least_finished:.0%} as many finished as were to be sent; goodput, where asked for, at least "
            f"{self.least_good:.0%}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Looks for the highest sustained rate: doubles from ``start`` until one is not sustained, then halves the interval
    (geometrically) until its ends are within ``precision`` of each other. Downwards in the same way where already the
    first is not sustained, at most to 1/1024 of it.
    """

    start: float = 1.0
    most: float = 1_000.0
    precision: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.start < math.inf:
            raise InvalidConfig("start_rate", self.start, "a number of requests a second above 0")
        if not self.start <= self.most < math.inf:
            raise InvalidConfig("max_rate", self.most, f"a number of requests a second from {self.start:g}")
        if not 0.01 <= self.precision <= 1:
            raise InvalidConfig("precision", self.precision, "a share from 0.01 to 1")

    def next_rate(self, tried: Mapping[float, bool]) -> float | None:
        """The rate to try next, None when the answer is known. ``tried``: rates, and whether each was sustained."""
        bad = min((rate for rate, good in tried.items() if not good), default=None)
        good = max((rate for rate, good in tried.items() if good and (bad is None or rate < bad)), default=None)
        if bad is None:
            if good is None:
                return self.start
            return min(2 * good, self.most) if good < self.most else None
        if good is None:
            return bad / 2 if bad > self.start / 1000 else None
        return math.sqrt(good * bad) if bad > good * (1 + self.precision) else None


@dataclass(frozen=True, slots=True)
class Step:
    """One rate that was tried. ``broken``: why it was not sustained."""

    rate: float
    report: Report
    broken: tuple[str, ...]

    @property
    def sustained(self) -> bool:
        return not self.broken


@dataclass(frozen=True, slots=True)
class Sweep:
    """Steps in the order of their rates. ``searched``: whether the rates were searched for, not given."""

    steps: tuple[Step, ...]
    rule: Rule
    searched: bool
    interrupted: bool = False

    @property
    def saturating_rate(self) -> float | None:
        """The highest sustained rate below the lowest one that was not; None if none was sustained."""
        bad = min((step.rate for step in self.steps if not step.sustained), default=math.inf)
        return max((step.rate for step in self.steps if step.sustained and step.rate < bad), default=None)

    @property
    def bounded(self) -> bool:
        """Whether a rate was seen that is too high: else the true saturating rate may be higher."""
        return any(not step.sustained for step in self.steps)

    def as_json(self) -> dict[str, Any]:
        return clean(
            {
                "kind": "greenroom-load sweep",
                "format": FORMAT,
                "saturating_rate": self.saturating_rate,
                "saturation_seen": self.bounded,
                "searched": self.searched,
                "interrupted": self.interrupted,
                "rule": str(self.rule),
                "steps": [
                    {
                        "rate": step.rate,
                        "sustained": step.sustained,
                        "why_not": list(step.broken),
                        "result": step.report.as_json(),
                    }
                    for step in self.steps
                ],
            }
        )

    def as_text(self) -> str:
        heads = ("rate/s", "offered", "done", "done/s", "goodput/s", "tok/s", "TTFT p50", "p99", "ITL p50", "E2E p99")
        rows: list[tuple[str, ...]] = [(*heads, "failed", "sustained")]
        rows += [self._row(step) for step in self.steps]
        lines = [columns(rows), "", str(self.rule)]
        found = self.saturating_rate
        if found is None:
            lines.append("no rate was sustained")
        else:
            more = "" if self.bounded else ", and no rate was too high: the true one may be higher"
            lines.append(f"highest sustained rate: {found:.4g} requests/s{more}")
        if any(step.report.found.whole.latencies.ttft.few for step in self.steps):
            lines.append("! * percentiles of fewer than 100 samples: give a longer --duration")
        for step in self.steps:
            if not step.report.trustworthy:
                lines.append(f"! at {step.rate:.4g}/s the generator itself was too slow to trust")
            elif step.sustained and _hasty(step.report.found):
                lines.append(
                    f"! at {step.rate:.4g}/s replies took more than a quarter of the sending time, too long to judge "
                    f"whether the queue grows: give a longer --duration"
                )
        return "\n".join(lines)

    @staticmethod
    def _row(step: Step) -> tuple[str, ...]:
        found = step.report.found
        timed = found.whole.latencies
        mark = "*" if timed.ttft.few else ""
        return (
            f"{step.rate:.4g}",
            f"{found.offered_rate:.4g}",
            f"{found.whole.completed}",
            number(found.request_throughput),
            number(found.request_goodput),
            number(found.output_throughput),
            number(timed.ttft_intended.median),
            number(timed.ttft_intended.percentiles[99]) + mark,
            number(timed.itl.median),
            number(timed.e2el_intended.percentiles[99]) + mark,
            str(found.whole.failed),
            "yes" if step.sustained else "no: " + "; ".join(step.broken),
        )


def _hasty(found: Figures) -> bool:
    return found.whole.latencies.e2el.median > found.sending_s * 1e3 / 4


def parse_rates(text: str, *, field: str = "rates") -> tuple[float, ...]:
    """``1,2,4`` as numbers in rising order, each once. Raises InvalidConfig."""
    try:
        rates = sorted({float(part) for part in text.replace(" ", ",").split(",") if part})
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise InvalidConfig(field, text, "requests a second above 0, such as 1,2,4,8")
    return tuple(rates)


def in_order(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(sorted(steps, key=lambda step: step.rate))
