"""The stage ``scheduling``: sweeps over load, what they come to, pictures and tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.emoe import plots
from benchmarks.emoe.jobs import AzureTraffic, of_profile
from benchmarks.emoe.profile import MAX_TOKENS
from benchmarks.emoe.simulate import Machine
from benchmarks.emoe.sweep import AT_SATURATION, AZURE, TASKS, Scale, Traffic, figures, points, run_all
from greenroom.core.model_profile import ModelProfile

KV_TOKENS = 32_768
TICK_MS = 200.0
"""A real scheduler's is 50: then the same comes out in twice the time."""


def run(
    profile: ModelProfile, scale: Scale, *, share: float, max_running: int, arrivals: Path | None, out: Path
) -> dict[str, Any]:
    """``share``: of the experts that fit a worker. ``arrivals``: recorded ones, as a second traffic."""
    common: dict[str, Any] = {"max_running": max_running, "kv_tokens": KV_TOKENS, "tick_ms": TICK_MS}
    machine = Machine(profile=profile, share=share, **common)
    population = of_profile(profile, max_tokens=MAX_TOKENS)
    traffics = [Traffic.of(TASKS, population, None, machine, scale.saturating_requests)]
    if arrivals is not None:
        azure = AzureTraffic.read(arrivals)
        resident = Machine(profile=profile, **common)
        traffics.append(Traffic.of(AZURE, azure.population, azure, resident, scale.azure_requests))
    whole = len(points(scale, [traffic.name for traffic in traffics]))
    with tqdm(total=whole, desc="scheduling", unit="run", disable=not sys.stderr.isatty()) as bar:
        rows = run_all(traffics, scale, bar.update)
    found = figures(rows)
    found["traffic"] = {
        one.name: {"saturation_per_s": one.saturation, "alone_ms": dict(one.alone_ms)} for one in traffics
    }
    found["settings"] = {
        "share": share, "max_running": max_running, "kv_tokens": KV_TOKENS, "requests": scale.requests,
        "seeds": scale.seeds, "beat_ms": machine.beat_ms, "tick_ms": machine.tick_ms,
    }  # fmt: skip
    _draw(found, scale, out)
    return found


def _draw(found: Mapping[str, Any], scale: Scale, out: Path) -> None:
    for name, steps in found["sweeps"].items():
        saturation = found["traffic"][name]["saturation_per_s"]
        plots.draw_sweep(steps, saturation, f"schedulers, simulated: {name}", out / f"rates-{name}.png")
    step = at_saturation(found)
    if step is not None:
        plots.draw_tasks(step, out / "tasks.png")
    if found["labels"]["by_accuracy"]:
        plots.draw_labels(found["labels"], scale.label_load, out / "labels.png")


def at_saturation(found: Mapping[str, Any]) -> Mapping[str, Any] | None:
    steps: Sequence[Mapping[str, Any]] = found["sweeps"].get(TASKS, [])
    return next((step for step in steps if step["load"] == AT_SATURATION), None)


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    lines = []
    for name, steps in found["sweeps"].items():
        known = found["traffic"][name]
        alone = ", ".join(f"{task} {ms:.0f}" for task, ms in known["alone_ms"].items())
        lines.append(f"\n{name}: FCFS is saturated at {known['saturation_per_s']:.3g}/s; alone, ms: {alone}")
        lines.append(f"  {'× saturation':<14}{'arm':<26}{'mean latency, s':>18}{'in time':>16}{'goodput/s':>18}")
        for step in steps:
            for arm, row in step["arms"].items():
                lines.append(
                    f"  {step['load']:<14g}{arm:<26}{_spread(row['mean_latency_ms'], 1e-3):>18}"
                    f"{_spread(row['attainment']):>16}{_spread(row['goodput']):>18}"
                )
            gained = step["goodput_ratio_fcfs"]
            if gained is not None:
                share = step["hindsight_share"]
                way = "" if share is None else f"; {share:.0%} of the way to hindsight"
                lines.append(f"  {'':<14}emoe over fcfs: {_spread(gained)}{way}")
    step = at_saturation(found)
    if step is not None:
        lines.append("\nshare in time by task type at saturation")
        for arm, row in step["arms"].items():
            tasks = "  ".join(f"{task} {one['attainment']['mean']:.2f}" for task, one in row["by_task"].items())
            multiples = "  ".join(f"{multiple}× {one['mean']:.2f}" for multiple, one in row["by_multiple"].items())
            lines.append(f"  {arm:<26}{tasks}   by SLO: {multiples}")
    for name, one in (found["estimate_errors"] or {}).items():
        lines.append(
            f"estimator {name}: median error {one['median']['mean']:+.0%}, mean size {one['mean_size']['mean']:.0%} of "
            "the time after the queue"
        )
    for one in found["labels"]["by_accuracy"]:
        change = one["latency_change_percent"]
        lines.append(
            f"labels {one['accuracy']:.0%} right: mean latency {change['mean']:+.1f} % (± {change['within']:.1f})"
        )
    return "\n".join(lines)


def _spread(found: Mapping[str, float] | None, scale: float = 1.0) -> str:
    return "-" if found is None else f"{scale * found['mean']:.2f} ± {scale * found['within']:.2f}"
