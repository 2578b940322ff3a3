"""How many executors, and how many experts in memory (Figs 17 and 18); what the decay window chooses.

python -m benchmarks.coserve --stage executors
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.coserve.boards import Task
from benchmarks.coserve.burst import SAMPLE_SEED
from benchmarks.coserve.costs import Costs, documented, kept_or_measured
from benchmarks.coserve.machines import HERE, MACHINES, Machine
from benchmarks.coserve.settings import AS_GOOD, EXECUTORS, Setting, run_with
from benchmarks.coserve.systems import COSERVE, OURS, PULL
from benchmarks.harness.parallel_replays import in_parallel
from benchmarks.harness.reporting.plots import curve, legend_below, panels_of, save, style_of, tidy
from benchmarks.harness.reporting.statistics import interval
from benchmarks.harness.reporting.tables import plus_minus
from greenroom.profiling.coe.config import CoeProfileConfig
from greenroom.profiling.coe.decay_window import Choice
from greenroom.profiling.coe.profiler import choose_residents
from greenroom.profiling.coe.replayed_throughput import Board, Scheme

SCHEMES: Final[Mapping[str, Scheme]] = {"CoServe": COSERVE, OURS: PULL}


@dataclass(frozen=True, slots=True)
class Scale:
    """``requests``: of a burst of board A. ``points``: numbers of residents of a sweep. ``sample``: requests that the
    window is slid on."""

    seeds: int = 5
    machines: tuple[Machine, ...] = (HERE, MACHINES[2])
    requests: int = 2500
    points: int = 14
    sample: int = 1000
    measured: bool = True


QUICK = Scale(seeds=2, machines=(HERE,), requests=800, points=6, sample=300, measured=False)


@dataclass(frozen=True, slots=True)
class Job:
    machine: Machine
    system: str
    executors: int
    costs: Costs
    scale: Scale


def run(scale: Scale) -> dict[str, Any]:
    """``cells``: by machine, system and executors a sweep over residents and what the window chose."""
    costs = kept_or_measured() if scale.measured else documented()
    jobs = [
        Job(machine, system, count, costs, scale)
        for machine in scale.machines
        for system in SCHEMES
        for count in EXECUTORS
    ]
    cells = [cell for cell in in_parallel(swept, jobs, "executors") if cell["sweep"]]
    chosen = [chosen_of(cells, machine.name, system) for machine in scale.machines for system in SCHEMES]
    return {
        "cells": cells, "chosen": chosen,
        "window_share": min(one["window_share"] for one in chosen if one["machine"] == scale.machines[0].name),
    }  # fmt: skip


def swept(job: Job) -> dict[str, Any]:
    """Residents are the most probable experts; the rest of the memory is for intermediates."""
    scale, scheme = job.scale, SCHEMES[job.system]
    found: dict[str, Any] = {"machine": job.machine.name, "system": job.system, "executors": job.executors, "sweep": {}}
    sample = job.machine.board(Task("A", scale.sample, SAMPLE_SEED), job.costs)
    memory = job.machine.memory_of(sample)
    if not sample.fitting(memory, job.executors):
        return found
    window = window_of(sample, scheme, memory, job.executors, scale.sample)
    numbers = spread_over(sample.fitting(memory, job.executors), scale.points, (window.residents, window.drawn))
    boards = [job.machine.board(Task("A", scale.requests, seed), job.costs) for seed in range(scale.seeds)]
    for residents in numbers:
        found["sweep"][residents] = interval([per_s(own, scheme, memory, job.executors, residents) for own in boards])
    best = max(own["mean"] for own in found["sweep"].values())
    return {
        **found, "window": list(window.window), "residents": window.residents, "drawn": window.drawn,
        "tried": len(window.per_s), "best_per_s": best,
        "window_share": found["sweep"][window.residents]["mean"] / best,
        "drawn_share": found["sweep"][window.drawn]["mean"] / best,
    }  # fmt: skip


def window_of(board: Board, scheme: Scheme, memory: int, executors: int, requests: int) -> Choice:
    config = CoeProfileConfig(memory, executors, requests=requests, seed=SAMPLE_SEED)

    def serve(count: int, expert_bytes: int) -> float:
        served = run_with(board, scheme, Setting(count, expert_bytes), memory)
        return 0.0 if served is None else served.per_s

    return choose_residents(board, config, serve, executors)


def per_s(board: Board, scheme: Scheme, memory: int, executors: int, residents: int) -> float:
    """0: nothing is left for one request's intermediates."""
    served = run_with(board, scheme, Setting(executors, board.expert_bytes(residents, executors)), memory)
    return 0.0 if served is None else served.per_s


def spread_over(most: int, points: int, also: Sequence[int]) -> list[int]:
    """So many numbers from 1 to ``most``, closer to each other near ``most``, where batches no longer fit."""
    shares = np.concatenate([np.linspace(0, 0.8, points - points // 2), np.linspace(0.8, 1, points // 2 + 1)[1:]])
    return sorted({*(1 + round(share * (most - 1)) for share in shares), *also})


def chosen_of(cells: Sequence[Mapping[str, Any]], machine: str, system: str) -> dict[str, Any]:
    """The fewest executors that serve as much as any, to 1 %, by what the window chose for each."""
    own = [cell for cell in cells if (cell["machine"], cell["system"]) == (machine, system)]

    def chosen_per_s(cell: Mapping[str, Any]) -> float:
        mean: float = cell["sweep"][cell["residents"]]["mean"]
        return mean

    best = max(map(chosen_per_s, own))
    cell = min((cell for cell in own if chosen_per_s(cell) >= AS_GOOD * best), key=lambda cell: cell["executors"])
    return {
        "machine": machine, "system": system, "executors": cell["executors"], "residents": cell["residents"],
        "per_s": cell["sweep"][cell["residents"]],
        "window_share": chosen_per_s(cell) / max(one["best_per_s"] for one in own),
        "drawn_share": cell["sweep"][cell["drawn"]]["mean"] / max(one["best_per_s"] for one in own),
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{'':<44}{'executors':>10}{'window':>10}{'chosen':>8}{'requests/s':>16}{'of best':>9}"
        f"{'drawn':>7}{'of best':>9}"
    ]
    for cell in found["cells"]:
        window = f"{cell['window'][0]}-{cell['window'][1]}"
        lines.append(
            f"{cell['machine'] + ', ' + cell['system']:<44}{cell['executors']:>10}{window:>10}{cell['residents']:>8}"
            f"{plus_minus(cell['sweep'][cell['residents']], digits=1):>16}{cell['window_share']:>9.2f}"
            f"{cell['drawn']:>7}{cell['drawn_share']:>9.2f}"
        )
    for one in found["chosen"]:
        lines.append(
            f"{one['machine']}, {one['system']}: {one['executors']} executors, {one['residents']} residents: "
            f"{one['window_share']:.3f} of the best of all, the paper's draw {one['drawn_share']:.3f}"
        )
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    places = list(dict.fromkeys((cell["machine"], cell["system"]) for cell in found["cells"]))
    figure, panels = panels_of((len(places) + 1) // 2, 2, height=3.2)
    for panel, (machine, system) in zip(panels, places, strict=False):
        own = [cell for cell in found["cells"] if (cell["machine"], cell["system"]) == (machine, system)]
        for place, cell in enumerate(own):
            name = f"{cell['executors']} executor{'s' if cell['executors'] > 1 else ''}"
            style = style_of(place)
            curve(panel, list(cell["sweep"]), list(cell["sweep"].values()), label=name, **style)
            chosen = cell["residents"]
            panel.plot(
                [chosen], [cell["sweep"][chosen]["mean"]], "o", markersize=11, fillstyle="none", color=style["color"]
            )
        panel.set_ylim(0, None)
        panel.set_title(f"{system}, {machine}", fontsize=9)
        panel.set_xlabel("experts in memory (ring: chosen)")
        panel.set_ylabel("requests/s")
        tidy(panel)
    for panel in panels[len(places) :]:
        panel.remove()
    legend_below(figure, panels[: len(places)])
    save(figure, path)
