"""From answered requests to TTFT, TPOT, ITL and goodput. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.duoserve.serving.open_loop import Answered
from benchmarks.harness.reporting.statistics import geometric, percentile

SHARES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
SLO_MULTIPLE: Final = 5.0
"""The middle one of what eMoE draws its SLOs from, over what a request takes alone."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds."""

    ttft_s: float
    tpot_s: float

    @classmethod
    def of(cls, alone: Answered) -> Slo:
        """SLO_MULTIPLE times what a request of mean lengths takes alone."""
        return cls(SLO_MULTIPLE * alone.ttft_s, SLO_MULTIPLE * (alone.tpot_s or 0.0))

    def met(self, one: Answered) -> bool:
        return one.ttft_s <= self.ttft_s and (one.tpot_s or 0.0) <= self.tpot_s


def summary(answered: Sequence[Answered], slo: Slo) -> dict[str, Any]:
    """One run. Percentiles in seconds; ``goodput``: requests a second that met both SLOs, from the first one's coming
    to the last one's end; ``in_time``: their share."""
    rate = rate_of(answered)
    met = sum(slo.met(one) for one in answered) / len(answered)
    return {
        "ttft": _percentiles([one.ttft_s for one in answered]),
        "tpot": _percentiles([one.tpot_s for one in answered if one.tpot_s is not None]),
        "itl": _percentiles([gap for one in answered for gap in one.gaps_s]),
        "in_time": met,
        "goodput": met * rate,
        "rate": rate,
    }


def rate_of(answered: Sequence[Answered]) -> float:
    """Requests a second, from the first one's coming to the last one's end."""
    return len(answered) / (max(one.tokens_s[-1] for one in answered) - answered[0].came_s)


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """None of no values."""
    return {name: percentile(values, share) for name, share in SHARES.items()} if values else None


def over(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means, with their intervals, of ours over theirs, seed by seed."""
    found: dict[str, Any] = {
        what: {share: geometric([_of(one, what, share) for one in ours], [_of(one, what, share) for one in theirs])
               for share in SHARES}
        for what in ("ttft", "tpot", "itl")
    }  # fmt: skip
    return found | {"goodput": geometric([one["goodput"] for one in ours], [one["goodput"] for one in theirs])}


def _of(ran: Mapping[str, Any], what: str, share: str) -> float | None:
    return None if ran[what] is None else float(ran[what][share])
