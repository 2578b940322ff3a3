"""What the rounds' requests come to: latencies, throughput, bytes, ratios, and how much prediction can gain. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.duoserve.paper.requests import Request
from benchmarks.duoserve.paper.systems import ACC, DUOSERVE_K, DUOSERVE_LAYER, LITERAL, MOESYS
from benchmarks.harness.reporting.statistics import Spread, spread_json

Round = Sequence[Request]
Rounds = Mapping[str, Mapping[int, Round]]
"""By system and round, the same prompts in the same order."""

RATIOS = {
    "literal_over_acc": (ACC, LITERAL),
    "literal_over_moesys": (MOESYS, LITERAL),
    "duoserve_over_acc_at_k": (ACC, DUOSERVE_K),
    "duoserve_over_moesys": (MOESYS, DUOSERVE_LAYER),
    "duoserve_over_literal_at_k": (LITERAL, DUOSERVE_K),
}
"""How many times as fast: seconds of the first over those of the second, round by round."""


class Side(NamedTuple):
    """Seconds a decoded token: computing, and moving what on-demand fetching moves."""

    computing: float
    moving: float

    @property
    def most(self) -> float:
        """By how much fetching ahead can be faster, if it is never wrong: all of the shorter side is hidden."""
        return (self.computing + self.moving) / max(self.computing, self.moving)

    def most_with(self, bytes_ratio: float) -> float:
        """The same where so many times the bytes are moved, since some were foreseen wrongly."""
        return (self.computing + self.moving) / max(self.computing, self.moving * bytes_ratio)


def system_figures(rounds: Mapping[int, Round]) -> dict[str, Any]:
    requests = [request for own in rounds.values() for request in own]
    decoded, prompts = sum(request.decoded for request in requests), len(requests)
    return {
        "requests": prompts,
        "ttft_s": spread_json(Spread.of([_mean(own, ttft) for own in rounds.values()])),
        "end_to_end_s": spread_json(Spread.of([_mean(own, end_to_end) for own in rounds.values()])),
        "decode_ms": spread_json(Spread.of([1e3 * decode_seconds(own) for own in rounds.values()])),
        "decode_tokens_per_s": sorted(
            request.decoded / request.decode.seconds for request in requests if request.decoded
        ),
        "prefill_mib": sum(request.prefill.bytes_moved for request in requests) / prompts / 2**20,
        "decode_mib_a_token": sum(request.decode.bytes_moved for request in requests) / decoded / 2**20,
        "prefill_stall_s": sum(request.prefill.stall_seconds for request in requests) / prompts,
        "decode_stall_ms": 1e3 * sum(request.decode.stall_seconds for request in requests) / decoded,
    }


def ratios(rounds: Rounds) -> dict[str, Any]:
    """By name: end to end, to the first token, and decoding."""
    measures: dict[str, Callable[[Round], float]] = {
        "end_to_end": lambda own: _mean(own, end_to_end),
        "ttft": lambda own: _mean(own, ttft),
        "decode": decode_seconds,
    }
    found: dict[str, Any] = {}
    for name, (slow, fast) in RATIOS.items():
        values = {measure: _by_round(rounds[slow], rounds[fast], of) for measure, of in measures.items()}
        found[name] = {measure: spread_json(Spread.of(own)) for measure, own in values.items()}
    return found


def gains(rounds: Rounds) -> dict[str, Any]:
    """What prediction gains over on-demand fetching in the same slots while decoding, and what it could, by round.

    The bytes are those of decoding steps; a few of them move between steps and count there.
    """
    common = [number for number in rounds[ACC] if number in rounds[LITERAL]]
    sides = {number: sides_of(rounds[ACC][number]) for number in common}
    moved = {number: _bytes(rounds[LITERAL][number]) / _bytes(rounds[ACC][number]) for number in common}
    return {
        "computing_ms": spread_json(Spread.of([1e3 * side.computing for side in sides.values()])),
        "moving_ms": spread_json(Spread.of([1e3 * side.moving for side in sides.values()])),
        "at_most": spread_json(Spread.of([side.most for side in sides.values()])),
        "bytes_ratio": spread_json(Spread.of(list(moved.values()))),
        "at_most_with_what_is_wrong": spread_json(
            Spread.of([side.most_with(moved[number]) for number, side in sides.items()])
        ),
        "measured": spread_json(Spread.of(_by_round(rounds[ACC], rounds[LITERAL], decode_seconds))),
    }


def sides_of(own: Round) -> Side:
    """Of on-demand fetching: what is not waiting is computing; moving is the link's own time for the bytes."""
    decoded = sum(request.decoded for request in own)
    computing = sum(request.decode.seconds - request.decode.stall_seconds for request in own) / decoded
    rate = sum(request.bytes_moved for request in own) / sum(request.link_seconds for request in own)
    return Side(computing, _bytes(own) / decoded / rate)


def ttft(request: Request) -> float:
    return request.prefill.seconds


def end_to_end(request: Request) -> float:
    return request.seconds


def decode_seconds(own: Round) -> float:
    """A token after the first."""
    return sum(request.decode.seconds for request in own) / sum(request.decoded for request in own)


def _mean(own: Round, of: Callable[[Request], float]) -> float:
    return sum(map(of, own)) / len(own)


def _bytes(own: Round) -> int:
    return sum(request.decode.bytes_moved for request in own)


def _by_round(slow: Mapping[int, Round], fast: Mapping[int, Round], of: Callable[[Round], float]) -> list[float]:
    return [of(own) / of(fast[number]) for number, own in slow.items() if number in fast]
