"""The profile that the benchmark uses: lengths and popularity of the bundled model's tasks, costs measured now."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from benchmarks.emoe.step_times import measure_steps
from benchmarks.harness.closing import Closing
from benchmarks.harness.inputs.checkpoints import EXPERT_MIB, widened
from greenroom.core.model_profile import MeasuredCosts, ModelProfile, load_model_profile
from greenroom.demo import bundled_model_path
from greenroom.profiling.model.profiled_model import Subject
from greenroom.profiling.prompts import of_bundled_tasks
from greenroom.worker.model.config import WorkerConfig

MAX_TOKENS = 64
QUICK_MIB = 1.0
PROMPTS_PER_TASK = 12


class StepMeter(Closing):
    """A model of its own, all in memory, on which steps are timed. A context manager."""

    def __init__(self, folder: Path, max_running: int) -> None:
        config = WorkerConfig(model=str(folder), expert_memory="100%", max_running=max_running, progress=False)
        self._subject = Subject(config)
        prompts = of_bundled_tasks(PROMPTS_PER_TASK, seed=0, labelled_per_task=1)
        self._asked, _ = self._subject.tokenised(prompts.run, MAX_TOKENS)

    def measure(self, *, rounds: int, steps: int, loads: bool = True) -> MeasuredCosts:
        return measure_steps(self._subject, self._asked, rounds=rounds, steps=steps, loads=loads)

    def close(self) -> None:
        self._subject.close()


def model_folder(*, quick: bool) -> Path:
    """The widened bundled model, with smaller experts for a quick run."""
    return widened(QUICK_MIB if quick else EXPERT_MIB)


def bench_profile(given: Path | None, folder: Path, *, max_running: int, quick: bool) -> ModelProfile:
    """``given``, or the bundled model's. Costs that it lacks are measured on ``folder``.

    Widening changes no routing, so the two models' profiles differ in costs alone.
    """
    known = load_model_profile(given or bundled_model_path() / "profile.json")
    if given is not None and known.costs is not None:
        return known
    with StepMeter(folder, max_running) as meter:
        costs = meter.measure(rounds=2 if quick else 5, steps=6 if quick else 16)
    return structs.replace(known, costs=costs)
