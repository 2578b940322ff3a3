"""What the benchmark consists of, each part with its table and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.reporting.plots import picture
from benchmarks.harness.stages import Say, run_named
from greenroom.core.model_profile import ModelProfile

if TYPE_CHECKING:
    from benchmarks.emoe.scheduling.step_costs import ServingOverhead

MAX_RUNNING = 32

AIMS = {
    "recovered_at_60": Aim(0.7, at_least=True),
    "recovered_at_80": Aim(0.9, at_least=True),
    "latency_ratio_resident": Aim(1.05, at_least=False),
    "goodput_ratio_fcfs": Aim(1.3, at_least=True),
    "overhead_share": Aim(0.03, at_least=False),
    "decision_ms_at_1000": Aim(2.0, at_least=False),
    "simulator_error": Aim(0.1, at_least=False),
}


@dataclass
class Settings:
    """What was asked for, and what one stage leaves for the next."""

    quick: bool
    share: float
    out: Path
    seeds: int | None = None
    arms: tuple[str, ...] = ()
    """Of the memory figures; empty: all."""
    experts: tuple[float, ...] = ()
    """Shares for the memory figures; empty: as ``memory.Scale`` has them."""
    profile: Path | None = None
    trace: Path | None = None
    arrivals: Path | None = None
    measured: ModelProfile | None = field(default=None, init=False)
    overhead: ServingOverhead | None = field(default=None, init=False)
    """Of a real server, where the check has run."""

    @property
    def model_profile(self) -> ModelProfile:
        """Measured once."""
        if self.measured is None:
            from benchmarks.emoe.measured_profile import bench_profile, model_folder

            folder = model_folder(quick=self.quick)
            self.measured = bench_profile(self.profile, folder, max_running=MAX_RUNNING, quick=self.quick)
        return self.measured


def run_stages(stages: Iterable[str], settings: Settings, say: Say) -> dict[str, Any]:
    """See ``run_named``."""
    chosen = {stage: partial(_STAGES[stage], settings, say) for stage in stages}
    return run_named(chosen, AIMS, say, beside=("hindsight_share",))


def _scheduling(settings: Settings, say: Say) -> dict[str, Any]:
    from benchmarks.emoe.scheduling import stage as scheduling
    from benchmarks.emoe.scheduling.sweep import QUICK, Scale

    scale = QUICK if settings.quick else Scale()
    if settings.seeds is not None:
        scale = replace(scale, seeds=settings.seeds)
    found = scheduling.run(
        settings.model_profile, scale, share=settings.share, max_running=MAX_RUNNING, arrivals=settings.arrivals,
        out=settings.out, overhead=settings.overhead,
    )  # fmt: skip
    say(scheduling.table(found))
    return found


def _memory(settings: Settings, say: Say) -> dict[str, Any]:
    from benchmarks.emoe.measured_profile import model_folder
    from benchmarks.emoe.memory import plots
    from benchmarks.emoe.memory import stage as memory

    scale = memory.QUICK if settings.quick else memory.Scale()
    if settings.seeds is not None:
        scale = replace(scale, seeds=settings.seeds)
    if settings.experts:
        scale = replace(scale, shares=settings.experts)
    if settings.arms:
        kinds = tuple(kind for kind in scale.kinds if kind.name in (*settings.arms, "random"))
        scale = replace(scale, kinds=kinds, other_batches=())
    predictors = memory.trained(scale)
    found = memory.run(model_folder(quick=settings.quick), settings.model_profile, scale, predictors)
    shown = [row for row in found["rows"] if row["at_once"] == scale.at_once]
    picture(lambda: plots.draw_memory(shown, settings.out / "memory.png"), say)
    picture(lambda: plots.draw_memory_tasks(shown, memory.MAIN_SHARE, settings.out / "memory-tasks.png"), say)
    say(memory.table(found))
    return found


def _check(settings: Settings, say: Say) -> dict[str, Any]:
    from benchmarks.emoe.check import plots
    from benchmarks.emoe.check import stage as check
    from benchmarks.emoe.measured_profile import model_folder
    from benchmarks.emoe.scheduling.step_costs import ServingOverhead

    scale = check.QUICK if settings.quick else check.Scale()
    found = check.run(model_folder(quick=settings.quick), settings.model_profile, scale, max_running=MAX_RUNNING)
    settings.overhead = ServingOverhead(**found["overhead"])
    picture(lambda: plots.draw_check(found["points"], settings.out / "check.png"), say)
    say(check.table(found))
    return found


def _decision(settings: Settings, say: Say) -> dict[str, Any]:
    from benchmarks.emoe import decision

    found = decision.run(rounds=300 if settings.quick else 2000)
    say("1,000 wait, 64 run, nothing fits: " + ", ".join(f"{name} {value}" for name, value in found.items()))
    return found


def _table2(settings: Settings, say: Say) -> dict[str, Any]:
    import torch

    from benchmarks.emoe import table2

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small networks are slower on two
    try:
        plan = table2.plan_of(quick=settings.quick, seeds=settings.seeds)
        found = table2.run(plan)
        picture(lambda: table2.draw(found, settings.out / "table2.png"), say)
        if settings.trace is not None:
            recorded = table2.run(plan, trace=settings.trace)
            picture(lambda: table2.draw(recorded, settings.out / "table2-trace.png"), say)
            found["tables"] |= recorded["tables"]
    finally:
        torch.set_num_threads(threads)
    return found


_STAGES: dict[str, Callable[[Settings, Say], dict[str, Any]]] = {
    "table2": _table2,
    "memory": _memory,
    "check": _check,
    "scheduling": _scheduling,
    "decision": _decision,
}
STAGES = tuple(_STAGES)
