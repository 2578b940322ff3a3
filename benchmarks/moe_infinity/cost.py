"""What MoE-Infinity's decisions cost (§8.5: 21 µs for a search among 300 EAMs), and how that grows.

python -m benchmarks.moe_infinity --stage cost
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.reporting.plots import legend_below, panels_of, save, tidy
from benchmarks.harness.reporting.progress import each
from greenroom.core.pictures import COLOURS
from greenroom.policies.base.activation_matrix import Rows, Tokens
from greenroom.policies.base.events import Artifact, LayerRouting, Phase, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES, Eamc, NearestMembers
from greenroom.policies.moe_infinity.policy import MoeInfinity

PAPER_SEARCH_US: Final = 21.0

USED: Final = 0.1
"""The share of a layer's experts that a member's sequence used: 3 to 20 % in the paper (§3)."""
ROWS_BEFORE: Final = 8
"""Tokens that each sequence has had before it is timed, so that its matrix is that of one in full run."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A collection of so many ``members`` for a model of ``layers`` × ``experts``, top-1."""

    layers: int = 24
    experts: int = 128
    members: int = 300

    def __str__(self) -> str:
        return f"{self.layers} × {self.experts}, {self.members} EAMs"


MAIN: Final = Shape()


@dataclass(frozen=True, slots=True)
class Scale:
    """Every row is timed ``repeats`` times over about ``layers`` layers in whole steps; the rows take turns."""

    repeats: int = 25
    layers: int = 192
    at_once: tuple[int, ...] = (1, 8)
    shapes: tuple[Shape, ...] = (
        MAIN, Shape(layers=6), Shape(layers=48), Shape(experts=32), Shape(experts=256), Shape(members=30),
        Shape(members=100), Shape(members=1000),
    )  # fmt: skip


QUICK = Scale(repeats=5, layers=48, shapes=(MAIN, Shape(layers=6), Shape(experts=32), Shape(members=100)))


class Timed:
    """One shape with so many sequences at once, timed on routing that is drawn anew each time."""

    def __init__(self, shape: Shape, at_once: int) -> None:
        self.shape, self.at_once = shape, at_once
        self._random = np.random.default_rng(0)
        self._catalogue = Catalogue.uniform("cost", layers=shape.layers, experts=shape.experts, top_k=1)
        self._matrices = _members(self._catalogue, shape.members, self._random)
        self._sequences = np.arange(at_once, dtype=np.int64)
        self._rows: Rows = np.arange(at_once, dtype=np.intp)
        self._steps = 0
        eamc = Eamc(self._catalogue, self._matrices)
        self._nearest = NearestMembers(eamc, at_once)
        self.eamc_bytes = eamc.ratios.nbytes + eamc.ranks.nbytes + sum(one.nbytes for one in eamc.directions)
        self._policy = MoeInfinity(self._catalogue)
        self._policy.on_artifact_swapped(Artifact(EAMC, "1", {MATRICES: self._matrices}))
        self._only_caches = MoeInfinity(self._catalogue)
        for policy in (self._policy, self._only_caches):
            for routing in self._routings(ROWS_BEFORE):
                policy.on_layer_routed(routing)

    def search_us(self, steps: int) -> float:
        """A layer's look-up alone: all sequences' cosines to all members as they are now, and the nearest of each."""
        layers = [self._search(layer) for _ in range(steps) for layer in range(self.shape.layers)]
        return _each_us(layers)

    def decision_us(self, steps: int) -> float:
        """All that the policy does when a layer's router has spoken: matrices, look-up, priorities, recall."""
        return self._routed_us(self._policy, steps)

    def caching_us(self, steps: int) -> float:
        """The same without a collection: matrices and retention alone."""
        return self._routed_us(self._only_caches, steps)

    def _routed_us(self, policy: MoeInfinity, steps: int) -> float:
        routings = self._routings(steps)
        return _each_us([partial(policy.on_layer_routed, one) for one in routings])

    def _search(self, layer: int) -> Callable[[], object]:
        """One token more of each sequence, the second that went to its expert; as the policy does it."""
        experts = self._random.integers(self.shape.experts, size=self.at_once)
        if self.at_once == 1:
            return partial(self._nearest.add_token, layer, 0, experts, np.array([2.0], dtype=np.float32))
        ones = np.ones(self.at_once, dtype=np.float32)
        return partial(self._nearest.add, layer, self._rows, Tokens(self._rows, experts, ones), 2 * ones)

    def _routings(self, steps: int) -> list[LayerRouting]:
        """One token of each sequence, most of them to experts that it likes: those of one member."""
        routings = []
        for _ in range(steps):
            self._steps += 1
            phases = np.full(self.at_once, Phase.DECODE, dtype=np.uint8)
            step = Step("cost", self._steps, self._sequences, phases)
            for layer, span in enumerate(self._catalogue.spans):
                likes = self._matrices[: self.at_once, span]
                picks = np.array([self._random.choice(np.flatnonzero(own)) for own in likes])[:, None]
                routings.append(LayerRouting.from_picks(self._catalogue, step, layer, picks))
        return routings


def run(scale: Scale) -> dict[str, Any]:
    """By shape and sequences at once: medians in microseconds a layer, and half the width of the middle half."""
    arms = [Timed(shape, at_once) for shape in scale.shapes for at_once in scale.at_once]
    names = ("search_us", "decision_us", "caching_us")
    found: list[dict[str, list[float]]] = [{name: [] for name in names} for _ in arms]
    gc.collect()
    gc.freeze()  # what others left behind is not looked through again
    for _ in each(range(scale.repeats + 1), "cost"):
        for arm, times in zip(arms, found, strict=True):
            for name in names:
                times[name].append(getattr(arm, name)(max(1, scale.layers // arm.shape.layers)))
    gc.unfreeze()
    rows = [
        {**asdict(arm.shape), "at_once": arm.at_once, "eamc_bytes": arm.eamc_bytes}
        | {name: _middle(values[1:]) for name, values in times.items()}  # the first warms up
        for arm, times in zip(arms, found, strict=True)
    ]
    main = {row["at_once"]: row for row in rows if _shape_of(row) == MAIN}
    return {
        "rows": rows,
        **{f"search_us_{n}": row["search_us"]["median"] for n, row in main.items()},
        **{f"decision_us_{n}": row["decision_us"]["median"] for n, row in main.items()},
        "paper_search_us": PAPER_SEARCH_US,
    }


def table(found: Mapping[str, Any]) -> str:
    lines = [
        "µs of processor time a layer, median of repeats that take turns (± half the middle half)",
        f"the paper's search: {PAPER_SEARCH_US:g} µs",
        f"{'':<22}{'at once':>8}{'search':>16}{'whole decision':>18}{'caching alone':>17}{'MB':>7}",
    ]
    for row in found["rows"]:
        times = [_said(row[name]) for name in ("search_us", "decision_us", "caching_us")]
        lines.append(f"{_shape_of(row)!s:<22}{row['at_once']:>8}{times[0]:>16}{times[1]:>18}{times[2]:>17}"
                     f"{row['eamc_bytes'] / 1e6:>7.1f}")  # fmt: skip
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Growth with each of layers, experts and members, the others as in the main shape."""
    figure, panels = panels_of(1, 3)
    highest = 1.1 * max(row["decision_us"]["median"] for row in found["rows"])
    for panel, axis in zip(panels, ("layers", "experts", "members"), strict=True):
        for colour, name, label in ((COLOURS[0], "decision_us", "decision"), (COLOURS[1], "search_us", "search")):
            for at_once, style in zip(
                sorted({row["at_once"] for row in found["rows"]}), ("-", "--", ":"), strict=False
            ):
                own = [row for row in found["rows"] if row["at_once"] == at_once and _varies(row, axis)]
                own.sort(key=lambda row: row[axis])
                panel.plot([row[axis] for row in own], [row[name]["median"] for row in own], style, color=colour,
                           marker="o", label=f"{label}, {at_once} at once")  # fmt: skip
        panel.set_xlabel(axis)
        panel.set_xscale("log")
        ticks = sorted({row[axis] for row in found["rows"] if _varies(row, axis)})
        panel.set_xticks(ticks, map(str, ticks))
        panel.set_xticks([], minor=True)
        panel.set_ylim(0, highest)
        tidy(panel)
    panels[0].set_ylabel("µs a layer")
    legend_below(figure, panels)
    save(figure, path)


def _members(catalogue: Catalogue, members: int, random: np.random.Generator) -> NDArray[np.float32]:
    """Each uses ``USED`` of every layer's experts, drawn evenly."""
    experts = int(catalogue.experts_per_layer[0])
    order = random.random((members, catalogue.layers, experts)).argsort(axis=2)
    counts = np.where(order < max(1, round(USED * experts)), random.geometric(0.2, order.shape), 0)
    return counts.reshape(members, catalogue.size).astype(np.float32)


def _each_us(calls: Sequence[Callable[[], object]]) -> float:
    gc.disable()
    try:
        began = time.thread_time()  # of this thread's processor time: other work does not count
        for call in calls:
            call()
        return (time.thread_time() - began) * 1e6 / len(calls)
    finally:
        gc.enable()


def _middle(values: Sequence[float]) -> dict[str, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return {"median": round(statistics.median(values), 2), "within": round((high - low) / 2, 2)}


def _said(value: Mapping[str, float]) -> str:
    return f"{value['median']:.1f} ± {value['within']:.1f}"


def _shape_of(row: Mapping[str, Any]) -> Shape:
    return Shape(row["layers"], row["experts"], row["members"])


def _varies(row: Mapping[str, Any], axis: str) -> bool:
    """Whether it is the main shape but for that."""
    return all(row[name] == value for name, value in asdict(MAIN).items() if name != axis)
