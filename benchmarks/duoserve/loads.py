"""How many experts prompts and answers load, over the least that knows the whole trace and may pass experts through.

python -m benchmarks.duoserve --stage loads
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.inputs.fitted import QUICK_FIT, FitBoth, fitted_files
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import World, world_of
from benchmarks.harness.reporting.plots import grouped_bars, legend_below, panels_of, save, tidy
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.units import MIB
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Phase
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.traces.steps import TraceStep, layers_of

BUNDLED: Final = "bundled"
POLICIES: Final = ("next-use", "reuse", "duoserve")
CONCURRENT: Final = (1, 8)
ALL, PROMPTS = "prompts and answers", "prompts alone"
SLOTS: Final = 31 / 96
PROMPT_ROWS: Final = 200
"""Where recorded routing has no phases, so many rows of a sequence count as its prompt, at most half of them."""

EXPERT_BYTES: Final = 12 * MIB
LINK: Final = LinkProfile(25e9, 20e-6)
COMPUTE: Final = ComputeProfile(layer_s=1e-4, expert_s=3e-5)
"""A GPU behind PCIe. They decide what is prefetched in time, hence little of what is loaded."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``prompts``, ``sequences``, ``measured``: as in Table 3. ``rows``: of a trace that are replayed."""

    trace: Path | None = None
    prompts: int = 150
    sequences: int | None = None
    measured: float = 0.2
    rows: int = 10_000
    fit: FitBoth = field(default_factory=FitBoth)


QUICK = Scale(
    prompts=20,
    sequences=8,
    rows=600,
    fit=QUICK_FIT,
)


def run(scale: Scale) -> dict[str, Any]:
    """``cells``: of each model, kind, concurrency and policy the loads, and those over the bound."""
    kept, cells = Kept.usual(), list[dict[str, Any]]()
    for world in _worlds(scale):
        files = fitted_files(world.name, world.fitted, scale.fit, kept)
        for kind, trace in ((ALL, world.measured), (PROMPTS, prompts_of(world.measured))):
            cells += list(_cells(world.name, kind, trace, files, scale.rows))
    ratios = {(cell["model"], cell["kind"], cell["at_once"], cell["policy"]): cell["over_bound"] for cell in cells}
    return {
        "cells": cells,
        "loads_over_bound": ratios[BUNDLED, ALL, 1, "duoserve"],
        "prompt_loads_over_bound": ratios[BUNDLED, PROMPTS, 1, "duoserve"],
        "loads_over_bound_8": ratios[BUNDLED, ALL, 8, "duoserve"],
    }


def _worlds(scale: Scale) -> Iterator[World]:
    yield world_of(BUNDLED, record_routing(drawn_prompts(scale.prompts)), scale.measured)
    if scale.trace is not None:
        trace = RoutingTrace.load(scale.trace).part(0, scale.sequences)
        yield world_of(scale.trace.stem, prompted(trace), scale.measured)


def _cells(
    model: str, kind: str, trace: RoutingTrace, files: tuple[ReuseFile, PathFile], rows: int
) -> Iterator[dict[str, Any]]:
    setup = TimedReplay(trace, EXPERT_BYTES, LINK, COMPUTE)
    catalogue = setup.catalogue()
    slots = round(SLOTS * catalogue.size)
    for at_once in CONCURRENT:
        steps = list(trace.steps(concurrent=at_once, tokens=rows))
        uses = [layer for step in steps for layer in layers_of(catalogue, step)]
        bound = least_loads(uses, slots)
        for name in POLICIES:
            policy = create_policy(name, catalogue=catalogue)
            for file in files:
                if file.KIND in policy.artifacts:
                    policy.on_artifact_swapped(artifact_of(catalogue, file, model))
            with progress(len(steps), f"{model}, {kind}, {at_once}: {name}", "step") as bar:
                found = setup.run(policy, _told(steps, bar.update), slots)
            loads = round(found.bytes_moved / EXPERT_BYTES)
            yield {
                "model": model, "kind": kind, "at_once": at_once, "policy": name, "slots": slots,
                "rows": found.tokens, "uses": sum(map(len, uses)), "loads": loads, "bound": bound,
                "over_bound": loads / bound, "seconds": found.seconds,
            }  # fmt: skip


def _told(steps: Iterable[TraceStep], update: Any) -> Iterator[TraceStep]:
    for step in steps:
        yield step
        update()


def least_loads(uses: Sequence[Sequence[int]], slots: int) -> int:
    """The fewest loads that serve these layers' distinct experts, layer after layer, each layer's in any order.

    Whatever is loaded may leave again at once. Belady's rule with that freedom: after each layer those stay, of the
    residents and of what it has used, that are used again soonest.
    """
    later: dict[int, deque[int]] = defaultdict(deque)
    for at, layer in enumerate(uses):
        for key in layer:
            later[key].append(at)
    resident: set[int] = set()
    loads = 0
    for layer in uses:
        loads += len(set(layer) - resident)
        for key in layer:
            later[key].popleft()
        able = [key for key in resident.union(layer) if later[key]]
        resident = set(heapq.nsmallest(slots, able, key=lambda key: later[key][0]))
    return loads


def prompted(trace: RoutingTrace) -> RoutingTrace:
    """The trace with phases: as recorded, or the first rows of each sequence as its prompt."""
    if trace.phase is not None:
        return trace
    phase = np.full(trace.tokens, Phase.DECODE, dtype=np.uint8)
    for begin, end in zip(trace.seq_starts[:-1].tolist(), trace.seq_starts[1:].tolist(), strict=True):
        phase[begin : begin + min(PROMPT_ROWS, (end - begin) // 2)] = Phase.PREFILL
    return replace(trace, phase=phase)


def prompts_of(trace: RoutingTrace) -> RoutingTrace:
    """Only the rows of prompts."""
    assert trace.phase is not None
    rows = trace.phase == Phase.PREFILL
    owner = np.repeat(np.arange(trace.sequences), np.diff(trace.seq_starts))
    lengths = np.bincount(owner[rows], minlength=trace.sequences)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return RoutingTrace(
        trace.experts[rows], starts, num_experts=trace.num_experts, model=trace.model, phase=trace.phase[rows]
    )


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{'model, kind':<36}{'at once':>8}{'slots':>7}{'least':>9}" + "".join(f"{name:>12}" for name in POLICIES)]
    for cells in _by_place(found):
        first = cells[0]
        ratios = "".join(f"{cell['over_bound']:>12.3f}" for cell in cells)
        place = f"{first['model']}, {first['kind']}"
        lines.append(f"{place:<36}{first['at_once']:>8}{first['slots']:>7}{first['bound']:>9,}{ratios}")
    return "\n".join([*lines, "loads over the least that knows the trace and may pass experts through"])


def draw(found: Mapping[str, Any], path: Path) -> None:
    models = list(dict.fromkeys(cell["model"] for cell in found["cells"]))
    figure, panels = panels_of(1, len(models), height=3.2)
    for panel, model in zip(panels, models, strict=True):
        places = [cells for cells in _by_place(found) if cells[0]["model"] == model]
        arms = {name: [{"mean": cells[n]["over_bound"]} for cells in places] for n, name in enumerate(POLICIES)}
        grouped_bars(panel, [f"{cells[0]['kind']},\n{cells[0]['at_once']} at once" for cells in places], arms)
        panel.set_ylim(1, None)
        panel.set_title(model, fontsize=9)
        panel.set_ylabel("loads over the least possible")
        panel.tick_params(axis="x", labelsize=7)
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)


def _by_place(found: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """A list for each model, kind and concurrency: its cells, one a policy."""
    cells = found["cells"]
    return [cells[at : at + len(POLICIES)] for at in range(0, len(cells), len(POLICIES))]
