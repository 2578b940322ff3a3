"""The stage ``check``: real servers beside the simulator, on the same requests at the same times.

There is a ``greenroom serve`` for each scheduler. All experts are resident, so the check is of scheduling and step
times. The servers take turns, in an order that is drawn for each round; an idle one takes no time from the other. The
simulator uses the engine's step times from right before and right after, and what a server takes beside them
(``server_overhead.py``). That is measured on single requests and on a queue that never empties, not on the rounds it is
then checked with. The simulated scheduler goes by the profile that the servers were given, as theirs do. Each simulated
request has the tokens that the real one had.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.emoe.check.real_requests import SEED, Came, Crowd, Sent, all_at_once, alone_requests, crowd, plan, send
from benchmarks.emoe.check.server_overhead import Beyond, overhead_of
from benchmarks.emoe.measured_profile import MAX_TOKENS, StepMeter
from benchmarks.emoe.scheduling.jobs import Job
from benchmarks.emoe.scheduling.measures import summary
from benchmarks.emoe.scheduling.schedulers import ARMS, EMOE, FCFS
from benchmarks.emoe.scheduling.simulator import Machine, Served, Simulation
from benchmarks.emoe.scheduling.stage import KV_TOKENS
from benchmarks.emoe.step_times import mean_of
from benchmarks.harness.machine import cache_folder
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import geometric, interval, over_seeds
from benchmarks.harness.reporting.tables import plus_minus
from greenroom.core.model_profile import MeasuredCosts, ModelProfile, dump_model_profile
from greenroom.demo.tasks import TASKS
from greenroom.worker.usable_memory import usable_cores
from tests.integration.server import Server


@dataclass(frozen=True, slots=True)
class Scale:
    """``requests`` at each of ``loads`` (shares of the saturating rate), ``seeds`` times for each scheduler."""

    requests: int = 60
    loads: tuple[float, ...] = (0.5, 1.0)
    seeds: int = 3
    saturating: int = 64
    alone: int = 3
    steps: int = 8
    """Of each size that are timed before and after."""


QUICK = Scale(requests=16, loads=(1.0,), seeds=1, saturating=24, alone=1, steps=4)
SIDES = ("real", "simulated")
COMPARED = ("mean_latency_ms", "throughput", "goodput")


def run(folder: Path, profile: ModelProfile, scale: Scale, *, max_running: int) -> dict[str, Any]:
    """``overhead`` is a ``ServingOverhead``, the rest is for people and pictures."""
    with tempfile.TemporaryDirectory(prefix="bench-emoe-") as temporary, ExitStack() as stack:
        file = Path(temporary) / "profile.json"
        file.write_bytes(dump_model_profile(profile))
        meter = stack.enter_context(StepMeter(folder, max_running))
        servers = {arm: stack.enter_context(_server(arm, folder, file, max_running)) for arm in (FCFS, EMOE)}

        def steps() -> MeasuredCosts:
            return meter.measure(rounds=1, steps=scale.steps, loads=False)

        really = asyncio.run(_measured(servers, folder.name, steps, scale, max_running))

    def machine(steps: MeasuredCosts) -> Machine:
        return Machine(profile=profile, really=steps, max_running=max_running, kv_tokens=KV_TOKENS)

    return compared(really, machine, scale)


def _server(arm: str, folder: Path, profile: Path, max_running: int) -> Server:
    return Server(
        "--model", str(folder), "--served-model-name", folder.name, "--expert-memory", "100%",
        "--max-running", str(max_running), "--scheduling", ARMS[arm].policy, "--profile", str(profile),
        "--scheduling-options", json.dumps(dict(ARMS[arm].options)), "--threads", str(usable_cores()),
        cache=cache_folder(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Round:
    arm: str
    load: float
    seed: int
    asked: Sequence[Sent]
    came: Sequence[Came]


@dataclass(frozen=True)
class Really:
    """What servers did. ``steps``: step times, measured in between.

    ``steps[0]`` and ``steps[1]`` lie around what came ``alone`` and in ``crowds``; ``steps[n + 1]`` and ``steps[n +
    2]`` around the rounds of seed n.
    """

    alone: Mapping[str, Sequence[Crowd]]
    crowds: Sequence[Crowd]
    rounds: Sequence[Round]
    steps: Sequence[MeasuredCosts]

    @property
    def alone_ms(self) -> dict[str, float]:
        return {task: 1e3 * statistics.median(one.seconds for one in own) for task, own in self.alone.items()}


async def _measured(
    servers: Mapping[str, Server], model: str, measure: Callable[[], MeasuredCosts], scale: Scale, max_running: int
) -> Really:
    """``measure``: what the engine's steps take now, while no server has anything to do."""
    url = servers[FCFS].url
    steps = [measure()]
    alone = {
        task: [await crowd(url, model, one) for one in alone_requests(task, scale.alone + 1)][1:] for task in TASKS
    }
    crowds = [
        await crowd(url, model, all_at_once(scale.saturating, seed), at_once=2 * max_running)
        for seed in range(scale.seeds)
    ]
    steps.append(measure())
    really = Really(alone, crowds, [], steps)
    rate = statistics.fmean(len(one.asked) / one.seconds for one in crowds)
    order = random.Random(SEED)
    rounds: list[Round] = []
    with progress(scale.seeds * len(scale.loads) * len(servers), "check", "run") as bar:
        for seed in range(scale.seeds):
            for load in order.sample(scale.loads, len(scale.loads)):
                asked = plan(load * rate, scale.requests, seed, really.alone_ms)
                for arm in order.sample(list(servers), len(servers)):
                    came, _ = await send(servers[arm].url, model, asked)
                    rounds.append(Round(arm, load, seed, asked, came))
                    bar.update()
            steps.append(measure())
    return replace(really, rounds=rounds)


def compared(really: Really, machine: Callable[[MeasuredCosts], Machine], scale: Scale) -> dict[str, Any]:
    """The rounds beside the simulation of the same requests. ``bare``: without the server's own time."""
    before = machine(mean_of(really.steps[0], really.steps[1]))
    alone = [_beyond(one, before) for own in really.alone.values() for one in own]
    overhead = overhead_of(alone, [_beyond(one, before) for one in really.crowds])
    served = replace(before, overhead=overhead)
    runs: list[dict[str, Any]] = []
    for one in really.rounds:
        steps = machine(mean_of(*really.steps[1 + one.seed : 3 + one.seed]))
        real, simulated = both(one.arm, one.asked, one.came, replace(steps, overhead=overhead))
        _, bare = both(one.arm, one.asked, one.came, steps)
        runs.append(
            {"arm": one.arm, "load": one.load, "seed": one.seed}
            | {of: _summary(found) for of, found in zip((*SIDES, "bare"), (real, simulated, bare), strict=True)}
        )
    arms = list(dict.fromkeys(one.arm for one in sorted(really.rounds, key=lambda one: one.arm != FCFS)))
    points = [_point(arm, load, runs) for load in scale.loads for arm in arms]
    rates = {
        "real": [len(one.asked) / one.seconds for one in really.crowds],
        "simulated": [1e3 * len(one.asked) / _takes_ms(one, served) for one in really.crowds],
    }
    errors = {key: _error(points, key, "ratio") for key in COMPARED}
    return {
        "overhead": {key: round(getattr(overhead, key), 4) for key in ("request_ms", "step_ms", "row_ms")},
        "alone_ms": {
            "real": really.alone_ms,
            "simulated": {
                task: statistics.median(_takes_ms(one, served) for one in own) for task, own in really.alone.items()
            },
        },
        "saturation_per_s": {of: interval(found) for of, found in rates.items()},
        "saturation_ratio": geometric(rates["simulated"], rates["real"]),
        "points": points,
        "simulator_error": _worst(errors),
        "simulator_errors": errors,
        "simulator_errors_bare": {key: _error(points, key, "ratio_bare") for key in COMPARED},
        "goodput_over_fcfs": {f"{load:g}": _over_fcfs(load, runs) for load in scale.loads},
    }


def _over_fcfs(load: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """eMoE's goodput over that of FCFS, really and in the simulation, seed by seed."""
    own = {(run["arm"], run["seed"]): run for run in runs if run["load"] == load}
    seeds = sorted({seed for _, seed in own})
    return {of: geometric(*([own[arm, seed][of]["goodput"] for seed in seeds] for arm in (EMOE, FCFS))) for of in SIDES}


def _played(crowd: Crowd, machine: Machine) -> tuple[Simulation, list[Served]]:
    jobs = [
        _job(number, one, got, 0.0) for number, (one, got) in enumerate(zip(crowd.asked, crowd.came, strict=True))
    ]  # fmt: skip
    simulation = _simulation(FCFS, jobs, machine)
    return simulation, simulation.run()


def _takes_ms(crowd: Crowd, machine: Machine) -> float:
    _, served = _played(crowd, machine)
    return max(one.end_ms or 0.0 for one in served)


def _beyond(crowd: Crowd, machine: Machine) -> Beyond:
    simulation, served = _played(crowd, machine)
    (worker,) = simulation.workers.values()
    took = max(one.end_ms or 0.0 for one in served)
    return Beyond(1e3 * crowd.seconds - took, worker.steps, worker.step_rows)


def _point(arm: str, load: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [run for run in runs if (run["arm"], run["load"]) == (arm, load)]

    def ratios(of: str) -> dict[str, Any]:
        return {
            key: geometric([run[of][key] for run in own], [run["real"][key] for run in own]) for key in COMPARED
        }  # fmt: skip

    return {"arm": arm, "load": load, "ratio": ratios("simulated"), "ratio_bare": ratios("bare")} | {
        of: _figures(over_seeds([run[of] for run in own])) for of in SIDES
    }


def _summary(served: Sequence[Served]) -> dict[str, Any]:
    """``throughput``: answers a second, from the first arrival to the last answer."""
    ends = [one.end_ms for one in served if one.end_ms is not None]
    seconds = (max(ends, default=0.0) - min(one.job.at_ms for one in served)) / 1e3
    return {**summary(served), "throughput": len(ends) / seconds if ends else 0.0}


def _error(points: Sequence[Mapping[str, Any]], key: str, of: str) -> float | None:
    """Mean size of (simulated - real) / real."""
    ratios = [one[of][key]["mean"] for one in points if one[of][key] is not None]
    return statistics.fmean(abs(one - 1) for one in ratios) if ratios else None


def _worst(errors: Mapping[str, float | None]) -> float | None:
    """The largest of them, where all are known: the figure that has an aim."""
    known = [one for one in errors.values() if one is not None]
    return round(max(known), 4) if len(known) == len(errors) else None


def both(arm: str, asked: Sequence[Sent], came: Sequence[Came], machine: Machine) -> tuple[list[Served], list[Served]]:
    """What really happened to the requests, and what happens to the same ones in the simulation."""
    tokens: dict[str, Came] = {}
    for one, got in zip(asked, came, strict=True):
        if got.end_s is not None:
            tokens.setdefault(one.task, got)
    jobs, real = [], []
    for number, (one, got) in enumerate(zip(asked, came, strict=True)):
        job = _job(number, one, got if got.end_s is not None else tokens.get(one.task, got), 1e3 * one.at_s)
        jobs.append(job)
        end_ms = None if got.end_s is None else 1e3 * got.end_s
        real.append(Served(job, None, None, end_ms, got.why))
    return real, _simulation(arm, jobs, machine).run()


def _job(number: int, one: Sent, got: Came, at_ms: float) -> Job:
    return Job(
        f"r{number:06}", one.task, at_ms, max(1, got.tokens_in), max(1, got.tokens_out), MAX_TOKENS,
        slo_e2e_ms=one.slo_ms, label=one.task,
    )  # fmt: skip


def _simulation(arm: str, jobs: Sequence[Job], machine: Machine) -> Simulation:
    expected = machine.profile.expected_tokens
    return Simulation(jobs, ARMS[arm].create(), ARMS[arm].machine(machine), lambda job: expected(job.label))


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: found[key]["mean"] for key in (*COMPARED, "attainment", "given_up")},
        "within": {key: found[key]["within"] for key in (*COMPARED, "attainment")},
    }


def table(found: Mapping[str, Any]) -> str:
    rates, alone, beside = found["saturation_per_s"], found["alone_ms"], found["overhead"]
    lines = [
        f"beside the engine a server takes {beside['request_ms']:.1f} ms a request, {beside['step_ms']:.2f} ms a step, "
        f"{beside['row_ms']:.3f} ms a sequence in it",
        f"saturated at {plus_minus(rates['real'])}/s, simulated {plus_minus(rates['simulated'])}/s: "
        f"× {plus_minus(found['saturation_ratio'])}",
        "alone, ms (simulated): "
        + ", ".join(f"{task} {ms:.0f} ({alone['simulated'][task]:.0f})" for task, ms in alone["real"].items()),
        f"  {'× saturation':<14}{'arm':<8}{'mean latency, s: real':>24}{'simulated':>12}{'ratio':>16}"
        f"{'answers/s: real':>18}{'simulated':>12}{'ratio':>16}{'in time: real':>16}{'simulated':>12}",
    ]  # fmt: skip
    for point in found["points"]:
        real, simulated, ratios = point["real"], point["simulated"], point["ratio"]
        lines.append(
            f"  {point['load']:<14g}{point['arm']:<8}{real['mean_latency_ms'] / 1e3:>24.2f}"
            f"{simulated['mean_latency_ms'] / 1e3:>12.2f}{plus_minus(ratios['mean_latency_ms']):>16}"
            f"{real['throughput']:>18.2f}{simulated['throughput']:>12.2f}{plus_minus(ratios['throughput']):>16}"
            f"{real['attainment']:>16.2f}{simulated['attainment']:>12.2f}"
        )
    errors, bare = found["simulator_errors"], found["simulator_errors_bare"]
    lines.append(
        "mean error of the simulator (without the server's own time): "
        + ", ".join(f"{key} {_percent(errors[key])} ({_percent(bare[key])})" for key in COMPARED)
        + f"; the worst of them [simulator_error ≤ 0.1]: {_percent(found['simulator_error'])}"
    )
    for load, gained in found["goodput_over_fcfs"].items():
        lines.append(
            f"goodput of emoe over fcfs at {load}: really {plus_minus(gained['real'])}, "
            f"simulated {plus_minus(gained['simulated'])}"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
