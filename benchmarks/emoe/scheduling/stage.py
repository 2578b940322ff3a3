"""The stage ``scheduling``: sweeps over load, what they come to, pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.emoe.measured_profile import MAX_TOKENS
from benchmarks.emoe.scheduling import plots
from benchmarks.emoe.scheduling.jobs import AzureTraffic, of_profile
from benchmarks.emoe.scheduling.simulator import Machine
from benchmarks.emoe.scheduling.step_costs import ServingOverhead
from benchmarks.emoe.scheduling.sweep import AT_SATURATION, AZURE, TASKS, Scale, Traffic, figures, points, run_all
from benchmarks.harness.reporting.plots import picture
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.tables import plus_minus
from greenroom.core.model_profile import ModelProfile

KV_TOKENS = 32_768
TICK_MS = 200.0
"""A real scheduler's is 50: then the same comes out in twice the time."""


def run(
    profile: ModelProfile,
    scale: Scale,
    *,
    share: float,
    max_running: int,
    arrivals: Path | None,
    out: Path,
    overhead: ServingOverhead | None = None,
) -> dict[str, Any]:
    """``share``: of the experts that fit a worker. ``arrivals``: recorded ones, as a second traffic.

    ``overhead``: what a server takes beside its engine; nothing if it was not measured.
    """
    beside = overhead or ServingOverhead()
    common: dict[str, Any] = {
        "max_running": max_running, "kv_tokens": KV_TOKENS, "tick_ms": TICK_MS, "overhead": beside
    }  # fmt: skip
    common["profile"] = profile
    machine = Machine(share=share, **common)
    population = of_profile(profile, max_tokens=MAX_TOKENS)
    traffics = [Traffic.of(TASKS, population, None, machine, scale.saturating_requests)]
    if arrivals is not None:
        azure = AzureTraffic.read(arrivals)
        resident = Machine(**common)
        traffics.append(Traffic.of(AZURE, azure.population, azure, resident, scale.azure_requests))
    whole = len(points(scale, [traffic.name for traffic in traffics]))
    with progress(whole, "scheduling", "run") as bar:
        rows = run_all(traffics, scale, bar.update)
    found = figures(rows)
    found["traffic"] = {
        one.name: {"saturation_per_s": one.saturation, "alone_ms": dict(one.alone_ms)} for one in traffics
    }
    found["settings"] = {
        "share": share, "max_running": max_running, "kv_tokens": KV_TOKENS, "requests": scale.requests,
        "seeds": scale.seeds, "beat_ms": machine.beat_ms, "tick_ms": machine.tick_ms, "overhead": asdict(beside),
    }  # fmt: skip
    picture(lambda: _draw(found, scale, out), print)
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
                    f"  {step['load']:<14g}{arm:<26}{plus_minus(row['mean_latency_ms'], 1e-3):>18}"
                    f"{plus_minus(row['attainment']):>16}{plus_minus(row['goodput']):>18}"
                )
            lines.append(f"  {'':<14}{_beside_fcfs(step)}")
    lines.append(f"not below FCFS by more than the interval at any load: {_yes(found['never_below_fcfs'])}")
    step = at_saturation(found)
    if step is not None:
        lines.append("\ngoodput over that of FCFS at saturation, seed by seed (95 %)")
        for arm, gained in step["ratios_fcfs"].items():
            lines.append(f"  {arm:<26}{_ratio(gained)}")
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
    without = found["labels"]["without_labels"]
    if without is not None:
        change = without["latency_change_percent"]
        lines.append(
            f"no labels at all: mean latency {change['mean']:+.1f} % (± {change['within']:.1f}); then nothing is "
            "loaded for a request, and what is missed is not simulated"
        )
    return "\n".join(lines)


def _beside_fcfs(step: Mapping[str, Any]) -> str:
    if step["not_below_fcfs"] is None:
        return "emoe beside fcfs: not both were run"
    share = step["hindsight_share"]
    way = "" if share is None else f"; {share:.0%} of the way to hindsight"
    return (
        f"emoe over fcfs: {_ratio(step['goodput_ratio_fcfs'])}, {plus_minus(step['goodput_gained'])}/s more; "
        f"not below: {_yes(step['not_below_fcfs'])}{way}"
    )


def _ratio(found: Mapping[str, float] | None) -> str:
    return "- (none in time)" if found is None else f"× {found['mean']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _yes(held: bool | None) -> str:
    return "-" if held is None else "yes" if held else "NO"
