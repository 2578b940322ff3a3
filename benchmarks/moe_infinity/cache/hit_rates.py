"""Hit rates without prefetching (MoE-Infinity, §8.4): Fig. 11, and what each factor of Algorithm 2 is worth.

Every policy has the same traces, budgets and starts, with the conventions of `greenroom replay`. Hit rates are exact
counts; what varies is the world that a synthetic trace is drawn from. There are three references: Belady's optimum,
which holds nothing for the layer that runs; Belady as an engine can follow it; and a policy that knows a synthetic
trace but for its draws.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import deviation
from benchmarks.moe_infinity.cache.chance_oracle import Informed
from benchmarks.moe_infinity.cache.routing_streams import BUNDLED, Stream, bundled_stream, real_stream, synthetic_stream
from benchmarks.moe_infinity.calibration import BASELINES, TARGETS
from benchmarks.moe_infinity.synthetic_routing import MIXES, NLLB, SWITCH, Shape
from greenroom.predictor.kinds.reuse.fit import FitOptions
from greenroom.replay.hit_rates import ReplayResult, replay
from greenroom.replay.sweeps.processes import in_processes
from greenroom.replay.sweeps.sweep import BELADY, Place, PolicySpec, Sweep
from greenroom.replay.traces.steps import TraceStep

OURS: Final = "moe-infinity"
LITERAL: Final = "moe-infinity:literal=true"
REUSE: Final = "reuse"
BY_LAYER: Final = "moe-infinity:by_ratio=false"
BY_RATIO: Final = "moe-infinity:by_layer=false"
POLICIES: Final = (OURS, LITERAL, REUSE, "next-use", *BASELINES)
ABLATION: Final = (BY_LAYER, BY_RATIO)
HELD: Final = "belady, layer held"
INFORMED: Final = "draws unknown"
AT_MAIN: Final = (*ABLATION, HELD, INFORMED)
"""With the main cache size alone."""
REAL: Final = "recorded"


@dataclass(frozen=True, slots=True)
class Scale:
    """``seeds``: worlds at the paper's cache sizes, of ``sequences`` each after ``learnt`` others; ``curve_seeds``: at
    all sizes.

    ``prompts``: of the bundled model, ``at_once``. ``followers``: of `reuse`'s fit to worlds (None: if they help).
    ``tokens``: of ``trace``, a recorded routing.
    """

    seeds: int = 8
    curve_seeds: int = 3
    sequences: int = 500
    learnt: int = 300
    prompts: int = 240
    at_once: int = 8
    tokens: int = 30_000
    followers: bool | None = None
    trace: Path | None = None


QUICK: Final = Scale(
    seeds=2, curve_seeds=1, sequences=160, learnt=100, prompts=30, tokens=2000, followers=False
)  # fmt: skip
FIRST_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A policy's hit rates in percent, a world each, with so many slots and sequences at once."""

    stream: str
    policy: str
    slots: int
    at_once: int
    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float:
        return statistics.mean(self.by_seed.values())

    def over(self, other: Row) -> tuple[float, float]:
        """Points above ``other``: mean over the worlds that both ran on, and standard deviation."""
        apart = [rate - other.by_seed[seed] for seed, rate in self.by_seed.items() if seed in other.by_seed]
        return statistics.mean(apart), deviation(apart)


class Cells:
    """All streams' cells, for processes of their own: item (stream, place)."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = streams
        self.sweeps = [
            Sweep(one.trace, _specs(), one.slots, one.at_once, one.tokens, artifacts=one.artifacts) for one in streams
        ]
        self.items: list[tuple[int, Place]] = [
            (number, place)
            for number, sweep in enumerate(self.sweeps)
            for place in sweep.places
            if place[1].label not in AT_MAIN or place[2] == self.streams[number].main
        ]
        self.items += [
            (number, (one.at_once[0], PolicySpec(INFORMED, label=INFORMED), one.main))
            for number, one in enumerate(streams)
            if one.shares is not None
        ]

    def __call__(self, item: tuple[int, Place], go_on: Callable[[], None]) -> float:
        number, place = item
        if place[1].name == INFORMED:
            found = informed(self.streams[number], go_on)
        else:
            found = self.sweeps[number].cell(place, go_on).cache
        return 100 * found.hit_rate


def run(scale: Scale) -> dict[str, Any]:
    """Rows, and the figures that have aims."""
    cells = Cells(_streams(scale))
    order = sorted(range(len(cells.items)), key=lambda place: -_work(cells, cells.items[place]))
    with progress(len(order), "replaying", "cell") as bar:
        jobs = len(os.sched_getaffinity(0))
        rates = in_processes(cells, [cells.items[place] for place in order], jobs, bar.update)
    by_item = dict(zip(order, rates, strict=True))
    rows = rows_of(cells.streams, ((*item, by_item[place]) for place, item in enumerate(cells.items)))
    return {"calibrated": calibrated(rows), **figures(rows), "rows": [_record(row) for row in rows]}


def _streams(scale: Scale) -> list[Stream]:
    """Made in processes, because fitting the coefficients of `reuse` takes most of the time."""
    items: list[tuple[Shape | str, int]] = [(BUNDLED, 0)]
    if scale.trace is not None:
        items.append((REAL, 0))
    items += [(shape, number) for shape in (SWITCH, NLLB) for number in range(scale.seeds)]
    with progress(len(items), "routing", "stream") as bar:
        return in_processes(partial(_made, scale), items, len(os.sched_getaffinity(0)), bar.update)


def _made(scale: Scale, item: tuple[Shape | str, int], go_on: Callable[[], None]) -> Stream:
    kind, number = item
    options = FitOptions(followers=scale.followers)
    if isinstance(kind, Shape):
        curve = number < scale.curve_seeds
        return synthetic_stream(
            kind, FIRST_SEED + number, scale.sequences, scale.learnt, curve=curve, options=options
        )  # fmt: skip
    if kind == BUNDLED:
        return bundled_stream(scale.prompts, scale.prompts // 2, scale.at_once)
    assert scale.trace is not None, "else there is no such item"
    return real_stream(scale.trace, scale.tokens)


def _specs() -> tuple[PolicySpec, ...]:
    named = tuple(PolicySpec.parse(text) for text in (*POLICIES, *ABLATION))
    return (*named, PolicySpec(BELADY, label=HELD))


def informed(stream: Stream, go_on: Callable[[], None]) -> ReplayResult:
    """A synthetic stream under what knows all but the draws."""
    assert stream.shares is not None, "only what was drawn has shares"
    mix = MIXES[stream.name]

    def steps() -> Iterator[TraceStep]:
        for step in stream.trace.steps(concurrent=mix.at_once):
            yield step
            go_on()

    return replay(Informed(stream.trace.catalogue(), stream.shares, mix), steps(), stream.main)


def _work(cells: Cells, item: tuple[int, Place]) -> float:
    """About how long a cell takes. Long ones begin first."""
    number, (at_once, spec, _) = item
    return cells.sweeps[number].rows / (at_once or 1) * (10 if spec.name == REUSE else 1)


def rows_of(streams: Sequence[Stream], cells: Iterable[tuple[int, Place, float]]) -> list[Row]:
    """By stream, cache size and sequences at once, each policy's rates over the worlds."""
    found: dict[tuple[str, str, int, int], dict[int, float]] = {}
    for number, (at_once, spec, slots), rate in cells:
        stream = streams[number]
        name = stream.name if stream.tokens is None else REAL
        found.setdefault((name, spec.label, slots, at_once or 0), {})[stream.seed] = rate
    return [Row(*key, by_seed) for key, by_seed in found.items()]


# -- figures -------------------------------------------------------------------------------------------------------


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """``oracle_gap_points``, ``gain_over_best_baseline``, ``real_gap_points`` (None without a recorded routing), and
    their parts: points of hit rate, means and standard deviations over worlds."""
    synthetic = {name: _of_model(rows, name, target.slots) for name, target in TARGETS.items()}
    real = {
        policy: {row.at_once: -row.over(_find(rows, REAL, BELADY, row.slots, row.at_once))[0] for row in own}
        for policy in (*POLICIES, *ABLATION, HELD)
        if (own := [row for row in rows if (row.stream, row.policy) == (REAL, policy)])
    }
    better = {policy: max(real[policy].values()) for policy in (OURS, REUSE) if policy in real}
    return {
        "oracle_gap_points": round(max(own["oracle_gap"][0] for own in synthetic.values()), 2),
        "gain_over_best_baseline": round(min(own["gain_over_best_baseline"][0] for own in synthetic.values()), 2),
        "real_gap_points": round(min(better.values()), 2) if better else None,
        "real_gaps": {
            policy: {f"{n} at once": round(gap, 2) for n, gap in own.items()} for policy, own in real.items()
        },
        "synthetic": synthetic,
    }


def _of_model(rows: Sequence[Row], name: str, slots: int) -> dict[str, Any]:
    at_once = MIXES[name].at_once
    policies = {policy: _find(rows, name, policy, slots, at_once) for policy in (*POLICIES, *AT_MAIN, BELADY)}
    best = max((policies[name] for name in BASELINES), key=lambda row: row.mean)
    ours, belady = policies[OURS], policies[BELADY]
    return {
        "slots": slots,
        "at_once": at_once,
        "best_baseline": best.policy,
        "oracle_gap": _points(belady.over(ours)),
        "under_belady": {name: _points(belady.over(policies[name])) for name in (REUSE, INFORMED, HELD)},
        "gain_over_best_baseline": _points(ours.over(best)),
        "over": {
            lfu: {
                "layer decay alone": _points(policies[BY_LAYER].over(policies[lfu])),
                "activation ratio alone": _points(policies[BY_RATIO].over(policies[lfu])),
                "both": _points(ours.over(policies[lfu])),
            }
            for lfu in ("lfu", "lfu-reset")
        },
    }


def calibrated(rows: Sequence[Row]) -> dict[str, Any]:
    """Where the best baseline and Belady stand on the worlds of this run, beside the paper's."""
    found = {}
    for name, target in TARGETS.items():
        at_once = MIXES[name].at_once
        best = max((_find(rows, name, policy, target.slots, at_once) for policy in BASELINES), key=lambda row: row.mean)
        belady = _find(rows, name, BELADY, target.slots, at_once)
        found[name] = {
            "best_baseline": [best.policy, round(best.mean, 2), target.baseline],
            "belady": [round(belady.mean, 2), target.belady],
            "within_a_point": max(abs(best.mean - target.baseline), abs(belady.mean - target.belady)) <= 1.0,
        }
    return found


def _find(rows: Sequence[Row], stream: str, policy: str, slots: int, at_once: int) -> Row:
    wanted = (stream, policy, slots, at_once)
    return next(row for row in rows if (row.stream, row.policy, row.slots, row.at_once) == wanted)


def _points(found: tuple[float, float]) -> list[float]:
    return [round(value, 2) for value in found]


def _record(row: Row) -> dict[str, Any]:
    return {
        "stream": row.stream, "policy": row.policy, "slots": row.slots, "at_once": row.at_once,
        "hit_rate": round(row.mean, 2), "deviation": round(deviation(list(row.by_seed.values())), 2),
        "worlds": len(row.by_seed),
    }  # fmt: skip
