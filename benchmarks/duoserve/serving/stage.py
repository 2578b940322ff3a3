"""The stage `serving`: TTFT, TPOT, ITL and goodput by batch policy, load and machine.

python -m benchmarks.duoserve --stage serving
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.duoserve.loads import BUNDLED
from benchmarks.duoserve.loads import QUICK as LOADS_QUICK
from benchmarks.duoserve.loads import Scale as LoadsScale
from benchmarks.duoserve.serving import real_engine
from benchmarks.duoserve.serving.arms import ARMS, AT_OTHER_LOADS, BASE, MAIN, PHASES, WITH_LONG_PROMPTS, Arm
from benchmarks.duoserve.serving.figures import Slo, over, rate_of, summary
from benchmarks.duoserve.serving.machines import GPU, Machine, this_machine
from benchmarks.duoserve.serving.requests import Request, Routes, requests_of, subjects_of
from benchmarks.duoserve.serving.simulated_server import Server
from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.inputs.checkpoints import widened
from benchmarks.harness.inputs.fitted import fitted_files
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.shared_model import SharedModel
from benchmarks.harness.inputs.split_routing import World, world_of
from benchmarks.harness.reporting.progress import progress
from greenroom.replay import RoutingTrace
from greenroom.worker.usable_memory import usable_cores

HALF: Final = 0.5
TENTH: Final = 10.0
MEAN = Request(0.0, 1155, 211)
"""Azure's mean lengths."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``requests``: of a run; ``saturating``: of the run that finds saturation, many so that its end, where few answer,
    weighs little. ``loads``: multiples of saturation. ``seeds``: runs at half of it, and ``seeds_elsewhere`` at the
    others. ``fits``: what is fitted to, as in the stage `loads`. ``processes``: runs at once; None: one on each core
    that this process may use.
    """

    seeds: int = 5
    seeds_elsewhere: int = 3
    trace: Path | None = None
    requests: int = 40
    saturating: int = 100
    loads: tuple[float, ...] = (0.25, HALF, 1.25)
    arms: tuple[Arm, ...] = ARMS
    fits: LoadsScale = field(default_factory=LoadsScale)
    shorter: float = 1.0
    expert_mib: float = 11.0
    processes: int | None = None
    real: real_engine.Points = field(default_factory=real_engine.Points)


QUICK = Scale(
    seeds=2,
    requests=4,
    saturating=4,
    loads=(HALF,),
    arms=(BASE, PHASES),
    fits=LOADS_QUICK,
    shorter=20.0,
    expert_mib=1.0,
    processes=1,
    real=real_engine.Points(loads=(HALF,), requests=2, seeds=1, shorter=20.0),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One run. ``shorter``: lengths are divided by so much."""

    machine: Machine
    arm: Arm
    load: float
    shorter: float
    seed: int
    requests: int
    rate: float
    slo: Slo


def run(scale: Scale) -> dict[str, Any]:
    """``machines``: of each the cells, by lengths, load and policy, with each seed's figures and, over `fcfs`, the
    geometric means of the seeds' ratios. ``real``: the points on the real engine."""
    with SharedModel(widened(scale.expert_mib)) as shared:
        here = this_machine(shared.pack)
        bundled = world_of(BUNDLED, record_routing(drawn_prompts(scale.fits.prompts)), scale.fits.measured)
        own = fitted_files(bundled.name, bundled.fitted, scale.fits.fit, Kept.usual())
        with progress(scale.real.runs, "real engine") as bar:
            real = real_engine.measure(shared, own, scale.real, bar.update)
    server, name = _server(scale, bundled)
    found = [on_machine(scale, server, machine, name) for machine in (GPU, here, here.with_all())]
    half = {(cell["shorter"], cell["load"], cell["arm"]): cell for cell in found[0]["cells"]}[
        scale.shorter, HALF, PHASES.name
    ]
    ratios = {f"{what}_p95_ratio": half["over_fcfs"][what]["p95"] for what in ("ttft", "tpot")}
    return {
        "model": name, "machines": found, "real": real,
        **{key: ratio and ratio["mean"] for key, ratio in ratios.items()},
    }  # fmt: skip


def _server(scale: Scale, bundled: World) -> tuple[Server, str]:
    """On the trace's routing; without a trace, on the bundled model's."""
    world, subjects = bundled, subjects_of(bundled.measured, None)
    if scale.trace is not None:
        trace = RoutingTrace.load(scale.trace).part(0, scale.fits.sequences)
        world = world_of(scale.trace.stem, trace, scale.fits.measured)
        subjects = subjects_of(trace, scale.trace)[world.fitted.sequences :]
    files = fitted_files(world.name, world.fitted, scale.fits.fit, Kept.usual())
    return Server(world.measured, Routes(world.measured, subjects), files), world.name


def on_machine(scale: Scale, server: Server, machine: Machine, name: str) -> dict[str, Any]:
    """All runs on one machine."""
    at_once = [one.at_rate(1e9) for one in requests_of(scale.saturating, 0, shorter=scale.shorter)]
    kept = ARMS if machine is GPU else AT_OTHER_LOADS if machine.share == 1 else MAIN
    arms = [arm for arm in scale.arms if arm in kept]
    tenth = scale.shorter * TENTH
    shorter_at = {scale.shorter: scale.loads, tenth: (HALF,)}
    jobs, saturations = [], {}
    for shorter, loads in shorter_at.items():
        full = server.run(machine, BASE, at_once if shorter == scale.shorter else [_cut(one) for one in at_once], 0)
        rate = rate_of(full.answered)
        mean = replace(MEAN, prompt=round(MEAN.prompt / shorter), answer=max(2, round(MEAN.answer / shorter)))
        slo = Slo.of(server.run(machine, BASE, [mean], 0).answered[0])
        saturations[shorter] = {"rate": rate, "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}}
        jobs += [
            Job(machine, arm, load, shorter, seed, scale.requests, load * rate, slo)
            for load in loads
            for arm in arms
            if arm in (AT_OTHER_LOADS if load != HALF else WITH_LONG_PROMPTS if shorter == scale.shorter else ARMS)
            for seed in range(scale.seeds if load == HALF else min(scale.seeds, scale.seeds_elsewhere))
        ]
    jobs.sort(key=lambda job: (abs(job.load - HALF), job.seed))
    runs: dict[Job, dict[str, Any]] = {}
    with progress(len(jobs), f"{name}, {machine.name}") as bar:
        for job, ran in _each(server, jobs, scale.processes or usable_cores()):
            runs[job] = ran
            bar.update()
    return {
        "machine": machine.name,
        "link_bytes_per_s": machine.link.bytes_per_s,
        "compute": {key: getattr(machine.compute, key) for key in machine.compute.__slots__},
        "saturation": {f"{shorter:g}": own for shorter, own in saturations.items()},
        "cells": list(_cells(runs)),
    }


def _cut(one: Request) -> Request:
    return replace(one, prompt=max(1, round(one.prompt / TENTH)), answer=max(1, round(one.answer / TENTH)))


_SERVERS: list[Server] = []
"""In a process of the pool: the one that it runs jobs on."""


def _each(server: Server, jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Jobs as they end, so many at once."""
    if processes == 1:
        for job in jobs:
            yield job, run_job(server, job)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(server,)) as pool:
        running = {pool.submit(_run_here, job): job for job in jobs}
        for future in as_completed(running):
            yield running[future], future.result()


def _start(server: Server) -> None:
    torch.set_num_threads(1)
    _SERVERS.append(server)


def _run_here(job: Job) -> dict[str, Any]:
    return run_job(_SERVERS[0], job)


def run_job(server: Server, job: Job) -> dict[str, Any]:
    """Its summary. Its requests are those of every job of the same seed and lengths."""
    requests = [one.at_rate(job.rate) for one in requests_of(job.requests, job.seed, shorter=job.shorter)]
    ran = server.run(job.machine, job.arm, requests, job.seed)
    return {
        **summary(ran.answered, job.slo),
        "rows": ran.rows, "slots": ran.slots, "steps": ran.steps, "prompt_steps": ran.prompt_steps,
        "moved_bytes": ran.moved_bytes, "balanced_rows": ran.balanced_rows,
    }  # fmt: skip


def _cells(runs: Mapping[Job, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A cell a length, load and policy, its seeds in order."""
    by_cell: dict[tuple[float, float, str], dict[int, dict[str, Any]]] = {}
    for job, ran in runs.items():
        by_cell.setdefault((job.shorter, job.load, job.arm.name), {})[job.seed] = ran
    for (shorter, load, arm), own in sorted(by_cell.items(), key=lambda item: (item[0][:2], _place(item[0][2]))):
        base = by_cell[shorter, load, BASE.name]
        seeds = sorted(own)
        yield {
            "shorter": shorter, "load": load, "arm": arm,
            "runs": [own[seed] for seed in seeds],
            "over_fcfs": over([own[seed] for seed in seeds], [base[seed] for seed in seeds]),
        }  # fmt: skip


def _place(arm: str) -> int:
    return [one.name for one in ARMS].index(arm)
