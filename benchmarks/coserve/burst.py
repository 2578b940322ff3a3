"""Boards that arrive at once: throughput and switches of every system (Figs 13 to 16).

python -m benchmarks.coserve --stage burst
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.coserve.boards import Task, distinct
from benchmarks.coserve.bounds import bound_of
from benchmarks.coserve.costs import Costs, documented, kept_or_measured
from benchmarks.coserve.machines import HERE, MACHINES, Machine, loading_share, torch_load_ms
from benchmarks.coserve.settings import EXECUTORS, Setting, best_setting, candidates, run_with
from benchmarks.coserve.systems import (
    EVERY_SYSTEM,
    MATCHED,
    OURS,
    SAMBA,
    SAMBA_TORCH,
    SIMPLE,
    System,
)
from benchmarks.harness.parallel_replays import in_parallel
from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy
from benchmarks.harness.reporting.statistics import geometric, interval
from benchmarks.harness.reporting.tables import plus_minus
from greenroom.coe.simulation.simulate import Served

SAMPLE_SEED: Final = 1000
"""Of the sample that settings are found on; it is none of those that are measured."""
AIM_TASK: Final = "A, 3,500"
OTHER_SYSTEMS: Final = (SAMBA, "CoServe None", "CoServe", "one memory, LRU", "pull")
"""On machines other than this one."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``tasks``: boards, numbers of requests, whether they are scanned. ``sample``: requests to find settings on."""

    seeds: int = 5
    tasks: tuple[tuple[str, int, bool], ...] = (
        ("A", 2500, False), ("A", 3500, False), ("B", 2500, False), ("B", 3500, False),
        ("A", 3500, True), ("B", 3500, True),
    )  # fmt: skip
    machines: tuple[Machine, ...] = MACHINES
    sample: int = 3500
    measured: bool = True


QUICK = Scale(seeds=2, tasks=(("A", 2500, False), ("A", 3500, False)), machines=(HERE, MACHINES[2]), sample=600,
              measured=False)  # fmt: skip


def run(scale: Scale) -> dict[str, Any]:
    """``cells``: by machine, task and system. On top the figures that have aims, of 3,500 requests on this machine."""
    costs = kept_or_measured() if scale.measured else documented()
    asked = [(machine, system, scale.sample, costs) for machine in scale.machines for system in to_be_set(machine)]
    found = in_parallel(best_of, asked, "settings")
    settings: dict[str, dict[str, Setting]] = {machine.name: {} for machine in scale.machines}
    for (machine, system, *_), setting in zip(asked, found, strict=True):
        settings[machine.name][system.name] = setting
    for machine in scale.machines:
        for system in systems_of(machine):
            if system.name not in settings[machine.name]:
                settings[machine.name][system.name] = settings[machine.name]["CoServe"]
    places = [(machine, task) for machine in scale.machines for task in _tasks(machine, scale)]
    jobs = [
        Job(machine, Task(board, requests, seed, fixed), costs, settings[machine.name])
        for machine, (board, requests, fixed) in places
        for seed in range(scale.seeds)
    ]
    served = in_parallel(served_by_all, jobs, "burst")
    cells: list[dict[str, Any]] = []
    for place, (machine, (board, requests, fixed)) in enumerate(places):
        seeds = served[place * scale.seeds : (place + 1) * scale.seeds]
        cells += _cells(machine, Task(board, requests, 0, fixed).name, seeds, settings[machine.name])
    return {
        "costs": costs_json(costs), "cells": cells, "machines": _machines(costs, scale.machines),
        **figures(cells, HERE.name, AIM_TASK),
        "by_machine": {machine.name: figures(cells, machine.name, AIM_TASK) for machine in scale.machines},
    }  # fmt: skip


def _tasks(machine: Machine, scale: Scale) -> Iterator[tuple[str, int, bool]]:
    """All on this machine; on the others that which has the aims."""
    yield from (
        scale.tasks
        if machine == HERE
        else [task for task in scale.tasks if Task(*task[:2], 0, task[2]).name == AIM_TASK]
    )


def systems_of(machine: Machine) -> list[System]:
    return [system for system in EVERY_SYSTEM if machine == HERE or system.name in OTHER_SYSTEMS]


def to_be_set(machine: Machine) -> list[System]:
    """Those whose best setting is looked for; the paper's ablations, and baselines without a number, get CoServe's."""
    return [system for system in systems_of(machine) if system.name == "CoServe" or system.name not in MATCHED]


def best_of(asked: tuple[Machine, System, int, Costs]) -> Setting:
    """On a sample of board A; ``asked``: how many requests it has."""
    machine, system, requests, costs = asked
    sample = Task("A", requests, SAMPLE_SEED)
    board = machine.board(sample, costs)
    memory = machine.memory_of(board)
    if system.expert_share is not None:
        assert system.executors is not None
        return Setting(system.executors, int(system.expert_share * memory))
    own = torch_load_ms(sample, costs, machine, board) if system.torch else None
    executors = EXECUTORS if system.executors is None else (system.executors,)
    return best_setting(
        candidates(board, memory, executors),
        lambda setting: per_s_of(run_with(board, system.scheme, setting, memory, own)),
    )


def per_s_of(served: Served | None) -> float:
    return 0.0 if served is None else served.per_s


@dataclass(frozen=True, slots=True)
class Job:
    """A board that all systems of the machine serve, each with its setting."""

    machine: Machine
    task: Task
    costs: Costs
    settings: Mapping[str, Setting]


def served_by_all(job: Job) -> dict[str, Any]:
    """Of one seed: the bound, and by system what it served."""
    machine, task, settings = job.machine, job.task, job.settings
    board = machine.board(task, job.costs)
    memory = machine.memory_of(board)
    own = torch_load_ms(task, job.costs, machine, board)
    bound = bound_of(board, memory)
    found = {}
    for system in systems_of(machine):
        served = run_with(board, system.scheme, settings[system.name], memory, own if system.torch else None)
        found[system.name] = None if served is None else _row(served, bound.least_ms)
    return {
        "bound_per_s": 1000 * len(task.paths) / bound.least_ms, "least_switches": bound.switches,
        "limits": bound.limits, "used": len(distinct(task.paths)), "systems": found,
    }  # fmt: skip


def _row(served: Served, least_ms: float) -> dict[str, Any]:
    return {
        "per_s": served.per_s, "switches": served.loads, "switches_of_a_memory": max(served.loads_by_memory),
        "bound_share": least_ms / served.total_ms, "link_share": served.link_busy_ms / served.total_ms,
        "batch": len(served.latencies_ms) / served.batches,
    }  # fmt: skip


def _cells(
    machine: Machine, task: str, seeds: Sequence[Mapping[str, Any]], settings: Mapping[str, Setting]
) -> Iterator[dict[str, Any]]:
    for system in systems_of(machine):
        runs = [seed["systems"][system.name] for seed in seeds]
        if any(one is None for one in runs):
            yield {"machine": machine.name, "task": task, "system": system.name, "fits": False}
            continue
        setting = settings[system.name]
        yield {
            "machine": machine.name, "task": task, "system": system.name, "fits": True,
            "executors": setting.executors, "expert_bytes": setting.expert_bytes,
            **{name: interval([one[name] for one in runs]) for name in runs[0]},
            "values": {name: [one[name] for one in runs] for name in ("per_s", "switches", "bound_share")},
            "bound_per_s": interval([seed["bound_per_s"] for seed in seeds]),
            "least_switches": interval([seed["least_switches"] for seed in seeds]),
            "used": interval([seed["used"] for seed in seeds]),
            "limits": sorted({seed["limits"] for seed in seeds}),
        }  # fmt: skip


def figures(cells: Sequence[Mapping[str, Any]], machine: str, task: str) -> dict[str, Any]:
    """Ratios are geometric means over seeds; each seed has the same requests for all."""
    own = {
        cell["system"]: cell for cell in cells if (cell["machine"], cell["task"]) == (machine, task) and cell["fits"]
    }

    def over(name: str, ours: str, theirs: str) -> dict[str, float] | None:
        if ours not in own or theirs not in own:
            return None
        return geometric(own[ours]["values"][name], own[theirs]["values"][name])

    simple = max((name for name in SIMPLE if name in own), key=lambda name: own[name]["per_s"]["mean"], default="")
    ratios = {
        "coserve_over_samba": over("per_s", "CoServe", SAMBA),
        "pull_over_samba": over("per_s", OURS, SAMBA),
        "pull_over_samba_torch": over("per_s", OURS, SAMBA_TORCH),
        "pull_over_coserve": over("per_s", OURS, "CoServe"),
        "pull_over_simple": over("per_s", OURS, simple),
        "pull_switches_ratio": over("switches", OURS, SAMBA),
    }
    found: dict[str, Any] = {name: None if ratio is None else ratio["mean"] for name, ratio in ratios.items()}
    found["bound_share"] = own[OURS]["bound_share"]["mean"] if OURS in own else None
    return {**found, "best_simple": simple, "ratios": ratios}


def costs_json(costs: Costs) -> dict[str, Any]:
    return {
        "made": costs.made, "machine": costs.machine,
        "models": {
            role: {
                "record_bytes": own.record_bytes, "load_ms": own.batches.load_ms, "torch_ms": own.torch_ms,
                "loading_share": loading_share(own),
                "by_executors": {
                    count: {"request_ms": times.request_ms, "batch_ms": times.batch_ms, "most": times.most}
                    for count, times in own.batches.by_executors.items()
                },
            }
            for role, own in costs.models.items()
        },
    }  # fmt: skip


def _machines(costs: Costs, machines: Sequence[Machine]) -> dict[str, Any]:
    found = {}
    for machine in machines:
        board = machine.board(Task("A", 1, 0), costs)
        load_ms, alone = board.costs[0].load_ms, board.costs[0].by_executors[1].ms_of(1)
        found[machine.name] = {
            "memory_bytes": machine.memory_of(board), "all_bytes": sum(board.bytes_of), "load_ms": load_ms,
            "request_alone_ms": alone, "loading_share": load_ms / (load_ms + alone),
        }  # fmt: skip
    return found


# -- for people ------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    lines = [f"costs: {found['costs']['made']} on {found['costs']['machine']}"]
    for name, own in found["costs"]["models"].items():
        lines.append(
            f"  {name:<12}{own['record_bytes'] / 2**20:6.1f} MiB, load {own['load_ms']:6.1f} ms, from_pretrained "
            f"{own['torch_ms']:6.1f}, loading {own['loading_share']:.2f} of a cold request (paper: 0.9)"
        )
    for machine, task in dict.fromkeys((cell["machine"], cell["task"]) for cell in found["cells"]):
        cells = [cell for cell in found["cells"] if (cell["machine"], cell["task"]) == (machine, task)]
        first = next(cell for cell in cells if cell["fits"])
        lines += [
            "",
            f"{machine}: board {task} requests; bound {plus_minus(first['bound_per_s'], digits=1)} /s "
            f"({', '.join(first['limits'])}); {first['used']['mean']:.0f} experts used, least switches "
            f"{first['least_switches']['mean']:.0f}",
            f"{'':<30}{'executors':>10}{'requests/s':>16}{'of bound':>10}{'switches':>16}{'most of one':>13}",
        ]
        for cell in cells:
            if not cell["fits"]:
                lines.append(f"{cell['system']:<30}does not fit: no memory is left for one request's intermediates")
                continue
            lines.append(
                f"{cell['system']:<30}{cell['executors']:>10}{plus_minus(cell['per_s'], digits=1):>16}"
                f"{cell['bound_share']['mean']:>10.2f}{plus_minus(cell['switches'], digits=0):>16}"
                f"{cell['switches_of_a_memory']['mean']:>13.0f}"
            )
    lines += ["", f"{'':<30}" + "".join(f"{name.removeprefix('pull_')[:14]:>15}" for name in _RATIOS)]
    for machine, own in found["by_machine"].items():
        lines.append(f"{machine:<30}" + "".join(f"{_number(own[name]):>15}" for name in _RATIOS))
    lines.append(f"over: the best simple row, {found['best_simple']}")
    return "\n".join(lines)


_RATIOS: Final = (
    "coserve_over_samba", "pull_over_samba", "pull_over_coserve", "pull_over_simple", "pull_switches_ratio",
    "bound_share",
)  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw(found: Mapping[str, Any], path: Path) -> None:
    cells = [cell for cell in found["cells"] if cell["machine"] == HERE.name and cell["fits"]]
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    names = list(dict.fromkeys(cell["system"] for cell in cells if cell["task"] == tasks[0]))
    figure, panels = panels_of(2, 1, height=4.0)
    for panel, what, label in zip(panels, ("per_s", "switches"), ("requests/s", "switches"), strict=True):
        by_name = {(cell["task"], cell["system"]): cell for cell in cells}
        arms = {task: [by_name[task, name][what] for name in names] for task in tasks}
        grouped_bars(panel, names, arms)
        panel.set_ylabel(label)
        panel.tick_params(axis="x", labelsize=7, labelrotation=35)
        for tick in panel.get_xticklabels():
            tick.set_horizontalalignment("right")
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)
