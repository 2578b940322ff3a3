"""Figs 4 and 5: latency a token against the request rate, and its distribution at a low and at a high one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.arms.open_arms import Fleet
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.children.processes import ArmFailed
from benchmarks.harness.inputs.arrivals import burst_times, recorded_arrivals
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.harness.inputs.task_prompts import mixed
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, percentile, spread_json
from benchmarks.harness.rounds import in_turns, rotated
from benchmarks.moe_infinity.engine.arms.compared_policies import DISK_OFFLOAD, ON_DEMAND
from benchmarks.moe_infinity.engine.parts.batch_server import Batching, Served, serve

Answer = Callable[[Sequence[Ask]], ServedTurn]


def run(
    fleet: Fleet,
    names: Sequence[str],
    peer: Answer | None,
    *,
    requests: int,
    loads: Sequence[float],
    peer_loads: Sequence[float],
    peer_requests: int,
    rounds: int,
    seconds: float,
) -> dict[str, Any]:
    """``loads``: rates as multiples of what on-demand LRU carries in full batches.

    Each round has other requests at other times, which are the same for all arms of these ``names``. accelerate, which
    takes longest, gets the first ``peer_requests`` of the first round at ``peer_loads``.
    """
    trace = recorded_arrivals()
    unit = _saturation(fleet)
    runs: dict[float, dict[str, list[list[Served]]]] = {load: {name: [] for name in names} for load in loads}

    def at(load: float, round_: int, count: int, answer: Answer) -> list[Served]:
        asks = mixed(fleet.shared, requests, seed=round_)[:count]
        return serve(burst_times(requests, load * unit, round_, trace), asks, answer)

    total = len(loads) * rounds * len(names) + len(peer_loads) * (peer is not None)
    with progress(total, "request rates", "run") as bar:
        for round_, load in in_turns(loads, rounds, seconds, warm_up=False):
            for name in rotated(names, round_):
                runs[load][name].append(at(load, round_, requests, _of(fleet, name)))
                bar.update()
        errors: dict[float, str] = {}
        for load in peer_loads if peer is not None else ():
            assert peer is not None
            try:
                runs[load][DISK_OFFLOAD] = [at(load, 1, peer_requests, peer)]
            except ArmFailed as failed:
                errors[load] = str(failed)
            bar.update()
    points = [
        {"load": load, "rate": load * unit, "rows": {name: _figures(one) for name, one in own.items()},
         "accelerate_error": errors.get(load)}
        for load, own in runs.items()
    ]  # fmt: skip
    return {"points": points, "saturation": unit, "arrivals": "recorded" if trace else "drawn",
            "requests": requests, "peer_requests": peer_requests}  # fmt: skip


def _of(fleet: Fleet, name: str) -> Answer:
    return lambda asks: fleet[name].run(asks, len(asks))


def _saturation(fleet: Fleet) -> float:
    """Requests a second that on-demand LRU carries in full batches."""
    asks = mixed(fleet.shared, Batching().most, seed=0)
    return len(asks) / fleet[ON_DEMAND].run(asks, len(asks)).seconds


def _figures(runs: Sequence[Sequence[Served]]) -> dict[str, Any]:
    """``per_token_ms``: every request's, ascending."""
    means = [1e3 * statistics.fmean(one.per_token_s for one in own) for own in runs]
    every = sorted(1e3 * one.per_token_s for own in runs for one in own)
    whole = [one for own in runs for one in own]
    return {
        "mean_ms": spread_json(Spread.of(means)),
        "p50_ms": percentile(every, 0.5),
        "p99_ms": percentile(every, 0.99),
        "waited_s": statistics.fmean(one.began_s - one.arrived_s for one in whole),
        "mean_batch": len(whole) / sum(len({one.began_s for one in own}) for own in runs),
        "per_token_ms": [round(one, 3) for one in every],
    }


def highest_rates(found: Mapping[str, Any], bound_ms: float) -> dict[str, float | None]:
    """By arm the highest rate of those run whose mean latency a token is within the bound."""
    best: dict[str, float | None] = {}
    for point in found["points"]:
        for name, row in point["rows"].items():
            best.setdefault(name, None)
            if row["mean_ms"]["median"] <= bound_ms:
                best[name] = max(best[name] or 0.0, point["rate"])
    return best
