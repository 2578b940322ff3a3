"""The profile that the benchmark goes by: lengths and popularity of the bundled model's tasks, costs measured now."""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import structs
from tqdm import tqdm

from benchmarks.models import EXPERT_MIB, widened
from greenroom.core.model_profile import ModelProfile, load_model_profile
from greenroom.demo import bundled_model_path
from greenroom.profiling.config import ProfileConfig
from greenroom.profiling.profiler import Bar, profile_model
from greenroom.profiling.prompts import of_bundled_tasks
from greenroom.profiling.subject import Subject
from greenroom.worker.config import WorkerConfig

MAX_TOKENS = 64
QUICK_MIB = 1.0


def model_folder(*, quick: bool) -> Path:
    """The widened bundled model; with smaller experts where it is only to be seen that all works."""
    return widened(QUICK_MIB if quick else EXPERT_MIB)


def bench_profile(given: Path | None, folder: Path, *, max_running: int, quick: bool) -> ModelProfile:
    """``given``, or that of the bundled model where it is shipped; what that does not say of costs is measured on
    ``folder``. Widening changes no routing, so but for costs the profile of one is that of the other."""
    shipped = bundled_model_path() / "profile.json"
    known = load_model_profile(given) if given is not None else None
    if known is None and shipped.exists():
        known = load_model_profile(shipped)
    if known is not None and known.costs is not None and given is not None:
        return known
    config = ProfileConfig(
        stages=("lengths", "costs"), prompts_per_task=8 if quick else 40, max_tokens=MAX_TOKENS,
        rounds=2 if quick else 5, steps=8 if quick else 16,
    )  # fmt: skip
    worker = WorkerConfig(model=str(folder), expert_memory="100%", max_running=max_running, progress=False)
    prompts = of_bundled_tasks(config.prompts_per_task, seed=config.seed, labelled_per_task=1)
    with Subject(worker) as subject:

        def bar(turns: int) -> Bar:
            return tqdm(total=turns, desc="profile", unit="turn", disable=not sys.stderr.isatty())

        measured = profile_model(subject, prompts, config, bar, {}).profile
    return measured if known is None else structs.replace(known, costs=measured.costs)
