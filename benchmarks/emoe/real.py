"""The stage ``check``: real servers beside the simulator, on the same requests at the same times.

A ``greenroom serve`` for each scheduler, all experts resident, so that what is checked is the scheduling and the step
times. The servers take turns, in an order that is drawn for each round; one that has nothing to do takes no time from
the other. The simulator goes by what steps took right before the round, and what a request really had of tokens is what
it has in the simulation.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.emoe.arms import ARMS, EMOE, FCFS
from benchmarks.emoe.jobs import SLO_MULTIPLES, Job
from benchmarks.emoe.measures import geometric, interval, over_seeds, spread, summary
from benchmarks.emoe.profile import MAX_TOKENS, BenchProfile, StepMeter
from benchmarks.emoe.scheduling import KV_TOKENS
from benchmarks.emoe.simulate import Machine, Served, simulate
from benchmarks.machine import cache_folder
from greenroom.core.model_profile import dump_model_profile
from greenroom.demo.tasks import TASKS, sample
from greenroom.worker.machine import usable_cores
from greenroom_load.arrivals import Poisson
from tests.integration.server import Server

SEED = 77_000
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Scale:
    """``requests`` at each of ``loads`` (shares of the saturating rate), ``seeds`` times for each scheduler."""

    requests: int = 80
    loads: tuple[float, ...] = (0.5, 1.0)
    seeds: int = 3
    saturating: int = 96
    alone: int = 3
    steps: int = 8
    """Of each size that are timed before a round."""


QUICK = Scale(requests=16, loads=(1.0,), seeds=1, saturating=24, alone=1, steps=4)
SIDES = ("real", "simulated")
COMPARED = ("mean_latency_ms", "throughput", "goodput")


@dataclass(frozen=True, slots=True)
class Sent:
    """One request to be sent. ``at_s`` from the start of its run."""

    at_s: float
    task: str
    prompt: str
    slo_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Came:
    """Its answer. ``why``: what it was told instead."""

    tokens_in: int = 0
    tokens_out: int = 0
    end_s: float | None = None
    why: str = ""


def plan(rate: float, count: int, seed: int, alone_ms: Mapping[str, float]) -> list[Sent]:
    rng = random.Random(f"{SEED}/{seed}")
    times = Poisson(rate).times(random.Random(f"{seed}/gaps"))
    found = []
    for number, arrival in zip(range(count), times, strict=False):
        task = rng.choice(TASKS)
        drawn = sample(task, seed=SEED + seed, index=number, split="heldout")
        slo = rng.choice(SLO_MULTIPLES) * alone_ms[task] if alone_ms else None
        found.append(Sent(arrival.at_s or 0.0, task, drawn.prompt, slo))
    return found


async def send(url: str, model: str, sent: Sequence[Sent], *, at_once: int = 0) -> tuple[list[Came], float]:
    """As planned, or ``at_once`` at a time; with how many seconds all of it took."""
    places = asyncio.Semaphore(at_once or len(sent))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began = time.perf_counter()

        async def one(planned: Sent) -> Came:
            async with places:
                due = began + planned.at_s
                if not at_once:
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                return await _call(session, f"{url}/v1/chat/completions", model, planned, began)

        came = list(await asyncio.gather(*(one(planned) for planned in sent)))
        return came, time.perf_counter() - began


async def _call(session: aiohttp.ClientSession, url: str, model: str, planned: Sent, began: float) -> Came:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": planned.prompt}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "task_type": planned.task,
    }
    headers = {} if planned.slo_ms is None else {"x-slo-e2e-ms": f"{planned.slo_ms:.3f}"}
    try:
        async with session.post(url, json=body, headers=headers) as response:
            answer = json.loads(await response.read())
            if response.status != 200:
                return Came(why=str(answer["error"]["code"]))
    except (aiohttp.ClientError, TimeoutError) as error:
        return Came(why=type(error).__name__)
    usage = answer["usage"]
    return Came(usage["prompt_tokens"], usage["completion_tokens"], time.perf_counter() - began)


def run(folder: Path, bench: BenchProfile, scale: Scale, *, max_running: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-emoe-") as temporary, ExitStack() as stack:
        file = Path(temporary) / "profile.json"
        file.write_bytes(dump_model_profile(bench.profile))
        meter = stack.enter_context(StepMeter(folder, max_running))
        servers = {arm: stack.enter_context(_server(arm, folder, file, max_running)) for arm in (FCFS, EMOE)}

        def machine() -> Machine:
            now = bench.with_steps(meter.measure(rounds=1, steps=scale.steps))
            return Machine(
                profile=now.profile, prompt_step_ms=now.prompt_step_ms, max_running=max_running, kv_tokens=KV_TOKENS
            )

        return asyncio.run(_compare(servers, folder.name, machine, scale, max_running))


def _server(arm: str, folder: Path, profile: Path, max_running: int) -> Server:
    return Server(
        "--model", str(folder), "--served-model-name", folder.name, "--expert-memory", "100%",
        "--max-running", str(max_running), "--scheduling", ARMS[arm].policy, "--profile", str(profile),
        "--scheduling-options", json.dumps(dict(ARMS[arm].options)), "--threads", str(usable_cores()),
        cache=cache_folder(),
    )  # fmt: skip


async def _compare(
    servers: Mapping[str, Server], model: str, machine: Callable[[], Machine], scale: Scale, max_running: int
) -> dict[str, Any]:
    """``machine``: measures its steps when it is called, while no server has anything to do."""
    first = next(iter(servers.values()))
    now = machine()
    alone = [await _alone(first.url, model, task, scale.alone, now) for task in TASKS]
    alone_ms = {task: found["real"] for task, found in zip(TASKS, alone, strict=True)}
    rates = [await _saturated(first.url, model, scale, max_running, seed, machine()) for seed in range(scale.seeds)]
    real_rate = statistics.fmean(one["real"] for one in rates)
    rounds = [(load, seed) for seed in range(scale.seeds) for load in scale.loads]
    order = random.Random(SEED)
    order.shuffle(rounds)
    runs: list[dict[str, Any]] = []
    for load, seed in rounds:
        asked = plan(load * real_rate, scale.requests, seed, alone_ms)
        now = machine()
        for arm in order.sample(list(servers), len(servers)):
            came, _ = await send(servers[arm].url, model, asked)
            real, simulated = both(arm, asked, came, now)
            runs.append({"arm": arm, "load": load, "real": _summary(real), "simulated": _summary(simulated)})
    points = [_point(arm, load, runs) for load in scale.loads for arm in servers]
    return {
        "alone_ms": {of: {task: one[of] for task, one in zip(TASKS, alone, strict=True)} for of in SIDES},
        "saturation_per_s": {of: interval([one[of] for one in rates]) for of in SIDES},
        "saturation_ratio": geometric([one["simulated"] for one in rates], [one["real"] for one in rates]),
        "points": points,
        "simulator_error": {key: _error(points, key) for key in COMPARED},
    }


def _point(arm: str, load: float, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [run for run in runs if (run["arm"], run["load"]) == (arm, load)]
    ratios = {key: geometric(*([run[of][key] for run in own] for of in reversed(SIDES))) for key in COMPARED}
    return {"arm": arm, "load": load, "ratio": ratios} | {
        of: _figures(over_seeds([run[of] for run in own])) for of in SIDES
    }


def _summary(served: Sequence[Served]) -> dict[str, Any]:
    """``throughput``: answers a second, from the first arrival to the last answer."""
    ends = [one.end_ms for one in served if one.end_ms is not None]
    seconds = (max(ends, default=0.0) - min(one.job.at_ms for one in served)) / 1e3
    return {**summary(served), "throughput": len(ends) / seconds if ends else 0.0}


def _error(points: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Mean size of (simulated - real) / real."""
    ratios = [one["ratio"][key]["mean"] for one in points if one["ratio"][key] is not None]
    return statistics.fmean(abs(one - 1) for one in ratios) if ratios else None


async def _alone(url: str, model: str, task: str, times: int, machine: Machine) -> dict[str, float]:
    """Medians of what a request of the task takes with nobody beside it; one more comes before to warm up."""
    real, simulated = [], []
    for number in range(times + 1):
        drawn = sample(task, seed=SEED - 1, index=number, split="heldout")
        sent = Sent(0.0, task, drawn.prompt)
        (came,), seconds = await send(url, model, [sent])
        (served,) = _simulated(FCFS, [_job(0, sent, came, 0.0)], machine)
        real.append(1e3 * seconds)
        simulated.append(served.end_ms or 0.0)
    return {"real": statistics.median(real[1:]), "simulated": statistics.median(simulated[1:])}


async def _saturated(
    url: str, model: str, scale: Scale, max_running: int, seed: int, machine: Machine
) -> dict[str, float]:
    """Answers a second of first come first served where twice as many wait as can run."""
    crowd = [replace(one, at_s=0.0) for one in plan(1.0, scale.saturating, seed=-1 - seed, alone_ms={})]
    came, seconds = await send(url, model, crowd, at_once=2 * max_running)
    pairs = [(one, got) for one, got in zip(crowd, came, strict=True) if got.end_s is not None]
    jobs = [_job(number, one, got, 0.0) for number, (one, got) in enumerate(pairs)]
    ends = [one.end_ms or 0.0 for one in _simulated(FCFS, jobs, machine)]
    return {"real": len(pairs) / seconds, "simulated": len(jobs) / max(ends) * 1e3}


def both(arm: str, asked: Sequence[Sent], came: Sequence[Came], machine: Machine) -> tuple[list[Served], list[Served]]:
    """What really became of them, and what becomes of the same requests in the simulation."""
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
    return real, _simulated(arm, jobs, machine)


def _job(number: int, one: Sent, got: Came, at_ms: float) -> Job:
    return Job(
        f"r{number:06}", one.task, at_ms, max(1, got.tokens_in), max(1, got.tokens_out), MAX_TOKENS,
        slo_e2e_ms=one.slo_ms, label=one.task,
    )  # fmt: skip


def _simulated(arm: str, jobs: Sequence[Job], machine: Machine) -> list[Served]:
    return simulate(jobs, ARMS[arm].create(), ARMS[arm].machine(machine))


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: found[key]["mean"] for key in (*COMPARED, "attainment", "given_up")},
        "within": {key: found[key]["within"] for key in (*COMPARED, "attainment")},
    }


def table(found: Mapping[str, Any]) -> str:
    rates, alone = found["saturation_per_s"], found["alone_ms"]
    lines = [
        f"saturated at {spread(rates['real'])}/s, simulated {spread(rates['simulated'])}/s: "
        f"× {spread(found['saturation_ratio'])}",
        "alone, ms (simulated): "
        + ", ".join(f"{task} {ms:.0f} ({alone['simulated'][task]:.0f})" for task, ms in alone["real"].items()),
        f"  {'× saturation':<14}{'arm':<8}{'mean latency, s: real':>24}{'simulated':>12}{'ratio':>16}"
        f"{'answers/s: real':>18}{'simulated':>12}{'ratio':>16}{'in time: real':>16}{'simulated':>12}",
    ]  # fmt: skip
    for point in found["points"]:
        real, simulated, ratios = point["real"], point["simulated"], point["ratio"]
        lines.append(
            f"  {point['load']:<14g}{point['arm']:<8}{real['mean_latency_ms'] / 1e3:>24.2f}"
            f"{simulated['mean_latency_ms'] / 1e3:>12.2f}{spread(ratios['mean_latency_ms']):>16}"
            f"{real['throughput']:>18.2f}{simulated['throughput']:>12.2f}{spread(ratios['throughput']):>16}"
            f"{real['attainment']:>16.2f}{simulated['attainment']:>12.2f}"
        )
    return "\n".join(lines)
