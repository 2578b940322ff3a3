"""A line that never stops: the highest rate at which 99 of 100 requests are served in time, and how late they are.

python -m benchmarks.coserve --stage line
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.coserve.boards import Task
from benchmarks.coserve.burst import SAMPLE_SEED
from benchmarks.coserve.costs import Costs, documented, kept_or_measured
from benchmarks.coserve.machines import HERE, MACHINES, Machine
from benchmarks.coserve.settings import Setting, best_setting, candidates, run_with
from benchmarks.coserve.systems import EVERY_SYSTEM, OURS, SIMPLE, System
from benchmarks.harness.parallel_replays import in_parallel
from benchmarks.harness.reporting.plots import curve, legend_below, logarithmic, panels_of, save, style_of, tidy
from benchmarks.harness.reporting.statistics import geometric, interval, percentile
from benchmarks.harness.reporting.tables import plus_minus
from greenroom.coe.simulation.simulate import Served, Way

COSERVE: Final = "CoServe"
AS_PROFILED: Final = "CoServe, as for a burst"
"""With the executors and the memory that serve a burst best, as the paper's profiler finds them."""
SYSTEMS: Final = (COSERVE, AS_PROFILED, *SIMPLE, "pull, LRU", OURS)
SEARCHED: Final = (COSERVE, AS_PROFILED, OURS)
CLIMB: Final = 1.25
"""From one rate to the next until one is too much."""
LATE: Final = 0.01
"""Of the requests may take longer than the limit."""


_BURST: Final = 2000
_OF_A_BURST: Final = 0.6
"""Of a burst's throughput: where a line's highest rate is looked for first."""


@dataclass(frozen=True, slots=True)
class Limit:
    """``seconds``: for 99 % of requests. A line lasts ``lasts``, of which the first half fills the queues, so that one
    that only grows is seen. Rates are found to ``within``."""

    seconds: float
    lasts: float
    within: float = 0.02


@dataclass(frozen=True, slots=True)
class Place:
    """A machine, and the limits that are tried there with so many seeds."""

    machine: Machine
    limits: tuple[tuple[Limit, int | None], ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """``places[·].limits``: with how many seeds, None: ``seeds``. Settings are found at the first one."""

    seeds: int = 5
    places: tuple[Place, ...] = (
        Place(HERE, ((Limit(20, 100), None), (Limit(180, 360, 0.08), 2))),
        Place(MACHINES[2], ((Limit(20, 240), None), (Limit(180, 1080), None))),
    )
    measured: bool = True


QUICK = Scale(seeds=2, places=(Place(MACHINES[2], ((Limit(20, 60, 0.08), None),)),), measured=False)


@dataclass(frozen=True, slots=True)
class Job:
    machine: Machine
    limit: Limit
    seed: int
    costs: Costs
    settings: Mapping[str, Setting]
    from_rate: float


def run(scale: Scale) -> dict[str, Any]:
    """``places``: by machine and limit the highest rates, and what each system's requests take at CoServe's."""
    costs = kept_or_measured() if scale.measured else documented()
    places = []
    for place in scale.places:
        settings, rate = settings_of(place.machine, costs, place.limits[0][0])
        for limit, seeds in place.limits:
            jobs = [Job(place.machine, limit, seed, costs, settings, rate) for seed in range(seeds or scale.seeds)]
            runs = in_parallel(measured, jobs, f"{place.machine.name}, {limit.seconds:g} s")
            places.append(summary(place.machine, limit, settings, runs))
            rate = places[-1]["rates"][COSERVE]["mean"]
    first = [one for one in places if one["machine"] == scale.places[0].machine.name]
    return {
        "places": places,
        "line_rate_over_coserve": min(one["rate_over_coserve"]["mean"] for one in first),
        "line_p99_over_simple": max(one["p99_over_simple"]["mean"] for one in first),
    }


# -- one line --------------------------------------------------------------------------------------------------------


def arriving(paths: Sequence[tuple[int, ...]], rate: float, seed: int) -> list[Way]:
    """Poisson; the same seed has the same gaps at every rate, only longer or shorter ones. ``rate``: a second."""
    lots, at, ways = random.Random(f"line/{seed}"), 0.0, []
    for path in paths:
        at += 1000 * lots.expovariate(rate)
        ways.append(Way(at, path))
    return ways


def p99_s(served: Served) -> float:
    """Of the requests of the second half."""
    latencies = served.latencies_ms[len(served.latencies_ms) // 2 :]
    return percentile(latencies, 1 - LATE) / 1000


def line_of(job: Job, system: System, rate: float, setting: Setting | None = None) -> Served:
    """``setting``: None, that of the job."""
    setting = setting or job.settings[system.name]
    task = Task("A", max(100, round(rate * job.limit.lasts)), job.seed)
    board = job.machine.board(task, job.costs)
    served = run_with(
        board, system.scheme, setting, job.machine.memory_of(board),
        ways=arriving(board.paths, rate, job.seed),
    )  # fmt: skip
    assert served is not None, "its setting was found to fit"
    return served


def measured(job: Job) -> dict[str, Any]:
    """Of one seed: the highest rates of CoServe and of ours, and all systems at CoServe's."""
    known: dict[tuple[str, float], float] = {}

    def p99(name: str, rate: float) -> float:
        if (name, rate) not in known:
            known[name, rate] = p99_s(line_of(job, _system(name), rate, job.settings[name]))
        return known[name, rate]

    limit = job.limit
    rates = {
        name: highest_rate(lambda rate, name=name: p99(name, rate) <= limit.seconds, job.from_rate, limit.within)  # type: ignore[misc]
        for name in SEARCHED
    }
    at = rates[COSERVE]
    return {"rates": rates, "p99_s": {name: p99(name, at) for name in SYSTEMS}}


def highest_rate(serves: Callable[[float], bool], start: float, within: float) -> float:
    """The highest rate that is still served, to a share of ``within``, near ``start`` if it can be."""
    low, high = start, start
    if serves(start):
        while serves(high := high * CLIMB):
            low = high
    else:
        while not serves(low := low / CLIMB):
            high = low
    while high / low > 1 + within:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if serves(middle) else (low, middle)
    return low


# -- settings --------------------------------------------------------------------------------------------------------


def settings_of(machine: Machine, costs: Costs, limit: Limit) -> tuple[dict[str, Setting], float]:
    """By system the setting with the least p99 at a rate that CoServe can just serve within the limit, and that rate.

    It is where a line is hard: on a burst a setting may win that has long queues to make batches of.
    """
    probe = machine.board(Task("A", _BURST, SAMPLE_SEED), costs)
    memory = machine.memory_of(probe)
    able = candidates(probe, memory, shares=(1.0,))  # how much matters little: the stage `executors` shows it
    coserve = _system(COSERVE)
    on_a_burst = {setting: _per_s(run_with(probe, coserve.scheme, setting, memory)) for setting in able}
    profiled = best_setting(able, on_a_burst.__getitem__)

    short = replace(limit, lasts=limit.lasts / 2)

    def at(system: System, setting: Setting, rate: float) -> float:
        served = line_of(Job(machine, short, SAMPLE_SEED, costs, {system.name: setting}, rate), system, rate)
        return p99_s(served)

    start = on_a_burst[profiled] * _OF_A_BURST
    rate = highest_rate(lambda rate: at(coserve, profiled, rate) <= limit.seconds, start, 0.1)
    found = {
        name: best_setting(able, lambda setting, name=name: 1 / at(_system(name), setting, rate))  # type: ignore[misc]
        for name in SYSTEMS
        if name != AS_PROFILED
    }
    return {**found, AS_PROFILED: profiled}, rate


def _per_s(served: Served | None) -> float:
    return 0.0 if served is None else served.per_s


def _system(name: str) -> System:
    own = COSERVE if name == AS_PROFILED else name
    return next(system for system in EVERY_SYSTEM if system.name == own)


# -- what it comes to ------------------------------------------------------------------------------------------------


def summary(
    machine: Machine, limit: Limit, settings: Mapping[str, Setting], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The best simple system is that of the least mean p99."""
    by_name = {name: [run["p99_s"][name] for run in runs] for name in SYSTEMS}
    simple = min(SIMPLE, key=lambda name: sum(by_name[name]))
    rates = {name: [run["rates"][name] for run in runs] for name in SEARCHED}
    return {
        "machine": machine.name, "limit_s": limit.seconds, "seeds": len(runs), "lasts_s": limit.lasts,
        "executors": {name: setting.executors for name, setting in settings.items()},
        "rates": {name: interval(own) for name, own in rates.items()},
        "rate_over_coserve": geometric(rates[OURS], rates[COSERVE]),
        "rate_over_profiled": geometric(rates[OURS], rates[AS_PROFILED]),
        "p99_s": {name: interval(own) for name, own in by_name.items()},
        "best_simple": simple,
        "p99_over_simple": geometric(by_name[OURS], by_name[simple]),
        "p99_over_coserve": geometric(by_name[OURS], by_name[COSERVE]),
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for one in found["places"]:
        rates = ", ".join(f"{name} {plus_minus(own, digits=1)} /s" for name, own in one["rates"].items())
        lines += [
            f"{one['machine']}: 99 % within {one['limit_s']:g} s, {one['seeds']} seeds",
            f"  highest rate: {rates}; over CoServe {plus_minus(one['rate_over_coserve'])}, over it "
            f"as for a burst {plus_minus(one['rate_over_profiled'])}",
            f"  {'at the rate of CoServe':<30}{'executors':>10}{'p99, s':>18}",
        ]
        for name, own in one["p99_s"].items():
            lines.append(f"  {name:<30}{one['executors'][name]:>10}{plus_minus(own, digits=1):>18}")
        lines += [
            f"  pull over {one['best_simple']}: {plus_minus(one['p99_over_simple'])}; over CoServe: "
            f"{plus_minus(one['p99_over_coserve'])}",
            "",
        ]
    return "\n".join(lines[:-1])


def draw(found: Mapping[str, Any], path: Path) -> None:
    figure, panels = panels_of(1, len(found["places"]), height=3.6)
    for panel, one in zip(panels, found["places"], strict=True):
        for place, name in enumerate(SYSTEMS):
            curve(panel, [place], [one["p99_s"][name]], label=name, linestyle="none", **style_of(place))
        panel.axhline(one["limit_s"], color="0.6", linewidth=0.8)
        logarithmic(panel)
        panel.set_xticks([])
        panel.set_ylabel("p99 at the rate of CoServe, s")
        panel.set_title(f"{one['machine']}\n{one['limit_s']:g} s, {one['rates'][COSERVE]['mean']:.1f} /s", fontsize=8)
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)
