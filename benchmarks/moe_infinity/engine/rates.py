"""Figs 4 and 5: latency a token against the request rate, and its distribution at a low and at a high one."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.emoe.measures import percentile
from benchmarks.emoe.memory_arms import Ask
from benchmarks.engine.rows import Spread
from benchmarks.moe_infinity.engine import arrivals
from benchmarks.moe_infinity.engine.fleet import Fleet
from benchmarks.moe_infinity.engine.kinds import DISK_OFFLOAD, ON_DEMAND
from benchmarks.moe_infinity.engine.prompts import mixed
from benchmarks.moe_infinity.engine.serving import Batching, Served, serve
from benchmarks.moe_infinity.engine.turns import ServedTurn, in_turns, spread

Answer = Callable[[Sequence[Ask]], ServedTurn]


def run(
    fleet: Fleet,
    peer: Answer | None,
    *,
    requests: int,
    loads: Sequence[float],
    peer_loads: Sequence[float],
    peer_requests: int,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """``loads``: rates as multiples of what on-demand LRU gets through in full batches. Each round has other requests
    at other times; all arms the same. accelerate, which takes the longest, at ``peer_loads``, once, with the first
    ``peer_requests`` of the first round.
    """
    trace = arrivals.recorded()
    unit = _saturation(fleet)
    answers: dict[str, Answer] = {arm.kind.name: _of(fleet, arm.kind.name) for arm in fleet.arms}
    points: list[dict[str, Any]] = []
    total = len(loads) * rounds * len(answers) + len(peer_loads) * (peer is not None)
    with tqdm(total=total, desc="request rates", unit="run", disable=not sys.stderr.isatty()) as bar:
        for load in loads:
            rate = load * unit
            runs: dict[str, list[list[Served]]] = {name: [] for name in answers}
            for round_, name in in_turns(list(answers), rounds, seconds / len(loads), warm_up=False):
                asks = mixed(fleet.world, requests, seed=round_)
                runs[name].append(serve(arrivals.times(requests, rate, round_, trace), asks, answers[name]))
                bar.update()
            if peer is not None and load in peer_loads:
                few = mixed(fleet.world, requests, seed=1)[:peer_requests]
                runs[DISK_OFFLOAD] = [serve(arrivals.times(requests, rate, 1, trace), few, peer)]
                bar.update()
            points.append({"load": load, "rate": rate, "rows": {name: _figures(own) for name, own in runs.items()}})
    return {"points": points, "saturation": unit, "arrivals": "recorded" if trace else "drawn", "requests": requests}


def _of(fleet: Fleet, name: str) -> Answer:
    return lambda asks: fleet[name].run(asks, len(asks))


def _saturation(fleet: Fleet) -> float:
    """Requests a second of on-demand LRU in full batches."""
    asks = mixed(fleet.world, Batching().most, seed=0)
    return len(asks) / fleet[ON_DEMAND].run(asks, len(asks)).seconds


def _figures(runs: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """``per_token_ms``: every request's, ascending."""
    means = [1e3 * statistics.fmean(one.per_token_s for one in own) for own in runs]
    every = sorted(1e3 * one.per_token_s for own in runs for one in own)
    whole = [one for own in runs for one in own]
    return {
        "mean_ms": spread(Spread.of(means)),
        "p50_ms": percentile(every, 0.5),
        "p99_ms": percentile(every, 0.99),
        "waited_s": statistics.fmean(one.began_s - one.arrived_s for one in whole),
        "mean_batch": len(whole) / sum(len({one.began_s for one in own}) for own in runs),
        "per_token_ms": [round(one, 3) for one in every],
    }


def highest_rates(found: Mapping[str, Any], bound_ms: float) -> dict[str, float | None]:
    """By arm: the highest rate that was run at which the mean latency a token is within the bound."""
    best: dict[str, float | None] = {}
    for point in found["points"]:
        for name, row in point["rows"].items():
            best.setdefault(name, None)
            if row["mean_ms"]["median"] <= bound_ms:
                best[name] = max(best[name] or 0.0, point["rate"])
    return best
