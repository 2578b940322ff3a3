"""Prefetching alone: recall by experts a layer (Fig. 9) and by link speed (Fig. 10), refinement and priorities (§8.3).

    python -m benchmarks.moe_infinity --stage prefetch

*Recall* is the share of the used experts that had been fetched ahead and had landed when their layer's router spoke,
with nothing else kept (``PrefetchAlone``). MoE-Infinity leaves the first layer of a step to its cache, so its recall
there is 0. top-k and traced top-k have the k of the highest recall, found on the first seed. Traced top-k has counted
the uses in the collection's sequences. With ``--trace`` the same runs on recorded routing. *Expert-ready latency* is
how long a layer is blocked for an expert that it uses, or for all of them, with the policy's own cache of the paper's
size. ± is half a 95 % interval over seeds.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import interval
from benchmarks.moe_infinity.prefetch.cells import PERCENTILES, Arm, Cell, Measured, World, by_world, measure
from benchmarks.moe_infinity.simulated_models import MODELS, PCIE4_BYTES_PER_S, Model, recorded, switch_base
from greenroom.replay.sweeps.processes import in_processes

OURS: Final = Arm("moe-infinity", "moe-infinity")
ABLATED: Final = (
    Arm("refinement off", "moe-infinity", {"refine": False}),
    Arm("priorities off", "moe-infinity", {"priorities": False}),
)
REUSE: Final = Arm("reuse", "reuse")
LITERAL: Final = (
    Arm("literal", "moe-infinity", {"literal": True}),
    Arm("literal, priorities off", "moe-infinity", {"literal": True, "priorities": False}),
)
TUNED: Final = ("top-k", "traced-top-k")
RECORDED_LEARNT: Final = 150
"""Sequences of a recorded trace that the collection is made of, in an order drawn by the seed."""
RECORDED_SERVED: Final = 8
"""Served after them: a row that runs all layers has many more look-ups than an encoder-decoder's."""
RECORDED_ROWS: Final = 40
"""Of each of those, the first."""
RECORDED_COUNTS: Final = 2
"""Each how manieth k is tried."""
OTHERS: Final = (Arm("next-layer", "next-layer"), Arm("lru", "lru"))


@dataclass(frozen=True, slots=True)
class Scale:
    """``learnt`` sequences make the collection; the ``served`` ones after them are replayed. ``links``: bytes a second.

    ``fitted``: see World. ``at_once``: sequences for the expert-ready latency; recall is of one after the other. A
    recorded ``trace`` has ``trace_seeds`` and ``trace_links``.
    """

    seeds: int = 4
    learnt: int = 400
    served: int = 20
    fitted: bool = True
    at_once: tuple[int, ...] = (1, 8)
    counts_step: int = 1
    experts: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    links: tuple[float, ...] = (8e9, 16e9, 32e9, 64e9, 128e9)
    models: tuple[str, ...] = tuple(MODELS)
    trace: Path | None = None
    trace_seeds: int = 2
    trace_links: tuple[float, ...] = (8e9, 32e9, 128e9)
    jobs: int = len(os.sched_getaffinity(0))


QUICK = Scale(
    seeds=2, learnt=120, served=3, fitted=False, at_once=(1,), counts_step=3, experts=(8, 256), links=(8e9, 128e9),
    models=("switch-large-128",), trace_seeds=1, trace_links=(32e9,),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """One model on one link: ``arms``, and top-k and traced top-k at all k of the layer's width, over so many seeds."""

    model: Model
    link: float
    arms: tuple[Arm, ...]
    learnt: int
    served: int
    seeds: int
    counts_step: int
    fitted: bool
    rows: int | None = None

    @property
    def families(self) -> list[list[Arm]]:
        """Powers of 2 up to a layer's experts, each ``counts_step``-th of them from the largest down."""
        counts = [2**power for power in range(self.model.shape.experts.bit_length())][:: -self.counts_step]
        return [[Arm(f"{policy} {k}", policy, {"count": k}) for k in counts] for policy in TUNED]

    def cells(self, arms: Iterable[Arm], seeds: Iterable[int]) -> list[Cell]:
        worlds = [
            World(self.model, seed, self.learnt, self.served, rows=self.rows, fitted=self.fitted) for seed in seeds
        ]
        return [Cell(world, arm, self.link, 1, alone=True) for world in worlds for arm in arms]


def run(scale: Scale) -> dict[str, Any]:
    """``experts`` is Fig. 9, ``bandwidth`` Fig. 10 with the ablations, ``latency`` the expert-ready latency."""
    drawn = scale.learnt, scale.served, scale.seeds, scale.counts_step, scale.fitted
    widths = [Plan(switch_base(experts), PCIE4_BYTES_PER_S, (OURS, REUSE), *drawn) for experts in scale.experts]
    arms = (OURS, REUSE, *ABLATED)
    speeds = [Plan(MODELS[name], link, arms, *drawn) for name in scale.models for link in scale.links]
    if scale.trace is not None:
        served, counts = min(scale.served, RECORDED_SERVED), max(scale.counts_step, RECORDED_COUNTS)
        known = RECORDED_LEARNT, served, scale.trace_seeds, counts, scale.fitted, RECORDED_ROWS
        speeds += [Plan(recorded(scale.trace), link, arms, *known) for link in scale.trace_links]
    rows = _recalls([*widths, *speeds], scale.jobs)
    return {
        "experts": rows[: len(widths)],
        "bandwidth": rows[len(widths) :],
        "latency": _latencies(scale, rows),
        "link_of_latency": PCIE4_BYTES_PER_S,
    }


# -- recall --------------------------------------------------------------------------------------------------------


def _recalls(plans: Sequence[Plan], jobs: int) -> list[dict[str, Any]]:
    """A row for each."""
    first = [cell for plan in plans for cell in plan.cells((*plan.arms, *chain(*plan.families)), range(1))]
    found = _measured(first, jobs, "recall, and the best k")
    arms = [
        (*plan.arms, *(_best(found, plan.cells(family, range(1))) for family in plan.families)) for plan in plans
    ]  # fmt: skip
    rest = [cell for plan, own in zip(plans, arms, strict=True) for cell in plan.cells(own, range(1, plan.seeds))]
    found |= _measured(rest, jobs, "recall, other seeds")
    rows = []
    for plan, chosen in zip(plans, arms, strict=True):
        shown = {}
        for arm in chosen:
            own = [found[cell] for cell in plan.cells((arm,), range(plan.seeds))]
            tuned = {"k": arm.options["count"]} if arm.policy in TUNED else {}
            shown[arm.policy if tuned else arm.label] = {
                "recall": interval([one.recall or 0.0 for one in own]),
                "decoding": interval([one.recall_decoding or 0.0 for one in own]),
                **tuned,
            }
        rows.append({"model": plan.model.name, "experts": plan.model.shape.experts, "link": plan.link, "arms": shown})
    return rows


def _best(found: Mapping[Cell, Measured], cells: Iterable[Cell]) -> Arm:
    return max(cells, key=lambda cell: found[cell].recall or 0.0).arm


# -- expert-ready latency ------------------------------------------------------------------------------------------


def _latencies(scale: Scale, recalls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model and number of sequences at once."""
    plans = [
        (MODELS[name], at_once, (OURS, *ABLATED, *LITERAL, REUSE, *_tuned(recalls, name), *OTHERS))
        for name in scale.models
        for at_once in scale.at_once
    ]

    def cells(model: Model, at_once: int, arm: Arm) -> list[Cell]:
        worlds = [
            World(model, seed, scale.learnt, max(scale.served, 2 * at_once), fitted=scale.fitted)
            for seed in range(scale.seeds)
        ]
        return [Cell(world, arm, PCIE4_BYTES_PER_S, at_once, alone=False) for world in worlds]

    wanted = [cell for model, at_once, arms in plans for arm in arms for cell in cells(model, at_once, arm)]
    found = _measured(wanted, scale.jobs, "expert-ready latency")
    return [
        {
            "model": model.name,
            "at_once": at_once,
            "slots": model.slots,
            "arms": {arm.label: _latency([found[cell] for cell in cells(model, at_once, arm)]) for arm in arms},
        }
        for model, at_once, arms in plans
    ]


def _tuned(recalls: Sequence[Mapping[str, Any]], model: str) -> list[Arm]:
    """top-k and traced top-k with the k of the highest recall, on the link nearest to that of the latencies."""
    own = [row for row in recalls if row["model"] == model]
    nearest = min(own, key=lambda row: abs(row["link"] - PCIE4_BYTES_PER_S))
    return [Arm(policy, policy, {"count": nearest["arms"][policy]["k"]}) for policy in TUNED]


def _latency(measured: Sequence[Measured]) -> dict[str, Any]:
    """Means over seeds."""
    of: dict[str, list[float]] = {
        "ready": [one.ready for one in measured],
        "mean_wait_ms": [one.mean_wait_ms for one in measured],
        **{f"p{p}_ms": [one.waits_ms[place] for one in measured] for place, p in enumerate(PERCENTILES)},
        **{f"layer_p{p}_ms": [one.layers_ms[place] for one in measured] for place, p in enumerate(PERCENTILES)},
        "token_ms": [one.token_ms for one in measured],
        "wasted": [one.wasted / max(1, one.prefetches) for one in measured],
    }
    return {name: interval(values) for name, values in of.items()}


# -- both ----------------------------------------------------------------------------------------------------------


def _measured(cells: Sequence[Cell], jobs: int, said: str) -> dict[Cell, Measured]:
    """Each distinct cell once."""
    ordered = by_world(list(dict.fromkeys(cells)))
    if not ordered:
        return {}
    with progress(len(ordered), said) as bar:
        found = in_processes(measure, ordered, min(jobs, len(ordered)), bar.update)
    return dict(zip(ordered, found, strict=True))
