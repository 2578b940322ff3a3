"""What the benchmark consists of, each part with its table, its picture and its figures.

A stage is a module of its name in this package, imported at its turn. It has ``run(scale)``, whose result is its JSON,
``table(found)``, ``draw(found, path)``, a frozen dataclass ``Scale`` whose defaults are the whole run,
and ``QUICK``, a small one. A ``Scale`` with a field ``seeds`` takes ``--seeds``, one with ``trace`` ``--trace``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.aims import Aim
from benchmarks.harness.stages import Say, run_named
from greenroom.core.pictures import PlotUnavailable

STAGES = ("cache", "prefetch", "capacity", "drift", "cost", "engine")

AIMS = {
    "oracle_gap_points": Aim(5.0, at_least=False),
    "real_gap_points": Aim(8.0, at_least=False),
    "speed_ratio_accelerate": Aim(8.0, at_least=True),
    "stall_recovered": Aim(0.5, at_least=True),
    "lookup_share": Aim(0.01, at_least=False),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. ``seeds`` and ``trace`` None: as each stage has it."""

    quick: bool
    out: Path
    seeds: int | None = None
    trace: Path | None = None


def run_stages(stages: Iterable[str], settings: Settings, say: Say) -> dict[str, Any]:
    """See ``run_named``."""
    chosen = {stage: partial(_run, stage, settings, say) for stage in stages}
    return run_named(chosen, AIMS, say, beside=("gain_over_best_baseline",))


def scale_of(module: Any, settings: Settings) -> Any:
    """How much a stage's module is to do: as it has it, but for what was asked for."""
    scale = module.QUICK if settings.quick else module.Scale()
    asked = {"seeds": settings.seeds, "trace": settings.trace}
    known = {field.name for field in fields(scale)}
    return replace(scale, **{name: value for name, value in asked.items() if name in known and value is not None})


def _run(stage: str, settings: Settings, say: Say) -> dict[str, Any]:
    began = time.monotonic()
    module = import_module(f"benchmarks.moe_infinity.{stage}")
    found: dict[str, Any] = module.run(scale_of(module, settings))
    say(module.table(found))
    try:
        module.draw(found, settings.out / f"{stage}.png")
    except PlotUnavailable as error:
        say(f"no picture: {error}")
    return {**found, "seconds": round(time.monotonic() - began, 1)}
