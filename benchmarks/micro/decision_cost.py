"""What a layer's decisions cost the engine's thread under `duoserve`, beside `reuse` and `next-use`.

    python -m benchmarks.decision_cost [--rounds N] [--json PATH]

Random routing and random weights of a model's shape: what is foreseen is worthless, what it costs is not. Each policy
gets what the engine tells it, through the engine's own ``Predictions``; only what fetches is left out. With
``+ router`` the next layers' routers answer too, after the path. Policies take turns within a round.

Microseconds are the thread's processor time a layer, what a step's begin costs shared out among its layers; p95 is over
layers, without it. By part: of turns of their own, each part without those that it calls. The last line is one JSON
object.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.part_clock import PartClock
from benchmarks.harness.reporting.progress import each
from benchmarks.harness.reporting.statistics import Spread, geometric, percentile, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import rotated
from greenroom.core.artifacts.path_file import LAYERS_AHEAD, weights_of
from greenroom.experts.deciding.predictions import Predictions
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.policies.base.events import ROUTER, Artifact, LayerRouting, Phase, Prediction, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.duoserve.policy import DuoServe
from greenroom.policies.foresight.path_predictor import PathPredictor
from greenroom.policies.foresight.path_weights import PATH
from greenroom.policies.registry import create_policy
from greenroom.policies.reuse.chances import REUSE, ReuseChances
from greenroom.policies.reuse.policy import Reuse

AIM_US: Final = 60.0
"""What foreseeing may add a layer, over `reuse`."""

PARTS: Final[tuple[tuple[str, type, tuple[str, ...]], ...]] = (
    ("path, add", PathPredictor, ("on_layer_routed",)),
    ("path, answer", PathPredictor, ("on_step_started", "answer")),
    ("learn", DuoServe, ("_learn",)),
    ("blend, expect", DuoServe, ("on_prediction",)),
    ("reuse", ReuseChances, ("add", "logits")),
    ("wants", Reuse, ("_want_later", "_want_foreseen")),
)
REST: Final = "the rest"

_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_BEFORE: Final = 10
"""Steps that each sequence has had before it is timed."""


class _FetchesNothing:
    def pump(self) -> None:
        """The engine would queue what the policy wants."""


@dataclass
class Arm:
    """A policy, and what a layer cost it in each round."""

    name: str
    policy: ExpertPolicy
    with_router: bool
    mean_us: list[float] = field(default_factory=list)
    layers_us: list[float] = field(default_factory=list)
    parts_us: dict[str, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prefetcher = cast(Prefetcher, _FetchesNothing())
        self.predictions = Predictions(self.policy, self.policy.predictors, prefetcher, self.policy.asks)

    def begin(self, step: Step) -> None:
        self.policy.on_step_started(step)
        self.predictions.step_started(step)

    def layer(self, routing: LayerRouting, router: Callable[[int, int], NDArray[np.float32]]) -> None:
        self.policy.on_layer_routed(routing)
        self.predictions.layer_routed(routing)
        if self.with_router and (request := self.predictions.take_request(ROUTER)) is not None:
            self.predictions.answered(Prediction(request, "", router(*request.layers)))


@dataclass(frozen=True)
class Shape:
    """A model's, and how many sequences decode at once."""

    layers: int
    experts: int
    top_k: int
    sequences: int

    def catalogue(self) -> Catalogue:
        return Catalogue.uniform("cost", layers=self.layers, experts=self.experts, top_k=self.top_k)


class Routing:
    """Steps of one token of each sequence. Each sequence likes some experts of a layer better than others."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape, self.catalogue = shape, shape.catalogue()
        self._random = np.random.default_rng(seed)
        self._likes = self._random.normal(scale=2, size=(shape.sequences, shape.layers, shape.experts))
        self._number = 0
        self._router = self._random.random((shape.sequences, LAYERS_AHEAD * shape.experts), dtype=np.float32)

    def step(self) -> tuple[Step, list[LayerRouting]]:
        shape = self.shape
        self._number += 1
        phases = np.full(shape.sequences, Phase.DECODE, dtype=np.uint8)
        step = Step("cost", self._number, np.arange(shape.sequences), phases)
        drawn = self._likes + self._random.gumbel(size=self._likes.shape)
        picks = np.argpartition(-drawn, shape.top_k - 1, axis=2)[:, :, : shape.top_k]
        return step, [
            LayerRouting.from_picks(self.catalogue, step, layer, np.ascontiguousarray(picks[:, layer]))
            for layer in range(shape.layers)
        ]

    def router(self, start: int, stop: int) -> NDArray[np.float32]:
        """What the routers of these layers say of each row: anything."""
        return self._router[:, : (stop - start) * self.shape.experts]


def reuse_artifact(catalogue: Catalogue, seed: int = 0) -> Artifact:
    """Random coefficients, with followers."""
    random = np.random.default_rng(seed)
    keep = np.array([0.5, 0.8, 0.92, 0.97, 0.99], dtype=np.float32)
    pairs = sum(2 * width * width for width in catalogue.experts_per_layer.tolist())
    arrays: dict[str, NDArray[Any]] = {
        "keep": keep,
        "weights": random.random((catalogue.layers, len(keep) + 1), dtype=np.float32) / 5,
        "bias": np.zeros(catalogue.size, dtype=np.float32),
        "followers": random.normal(scale=0.05, size=pairs).astype(np.float32),
    }
    return Artifact(REUSE, "1", arrays)


def path_artifact(catalogue: Catalogue, window: int, seed: int = 0) -> Artifact:
    """Random weights of paths."""
    random, widths = np.random.default_rng(seed), catalogue.experts_per_layer.tolist()
    arrays: dict[str, NDArray[Any]] = {
        "window": np.array([window], dtype=np.float32),
        "weights": random.normal(scale=0.2, size=weights_of(widths, window)).astype(np.float16),
        "bias": random.normal(size=(LAYERS_AHEAD, catalogue.size)).astype(np.float32),
        "sequence": np.full((LAYERS_AHEAD, catalogue.layers), 0.7, dtype=np.float32),
    }
    return Artifact(PATH, "1", arrays)


def arms_of(catalogue: Catalogue, windows: Sequence[int]) -> list[Arm]:
    """`next-use`, `reuse`, and `duoserve` by each window; the last two also with routers."""
    reuse, arms = reuse_artifact(catalogue), [Arm("next-use", create_policy("next-use", catalogue=catalogue), False)]
    paths = [(f"duoserve, window {window}", path_artifact(catalogue, window)) for window in windows]
    for with_router in (False, True):
        for name, path in (("reuse", None), *paths):
            policy = create_policy("reuse" if path is None else "duoserve", catalogue=catalogue)
            for artifact in (reuse, path):
                if artifact is not None:
                    policy.on_artifact_swapped(policy.prepare(artifact))
            arms.append(Arm(name + (" + router" if with_router else ""), policy, with_router))
    return arms


def play(arm: Arm, routing: Routing, steps: Sequence[tuple[Step, list[LayerRouting]]]) -> tuple[float, list[float]]:
    """Microseconds a layer over all, and of each layer without its step's begin."""
    layers, begins, now = [], 0.0, time.thread_time
    gc.disable()
    try:
        for step, routings in steps:
            began = now()
            arm.begin(step)
            before = now()
            begins += before - began
            for one in routings:
                arm.layer(one, routing.router)
                after = now()
                layers.append((after - before) * 1e6)
                before = after
    finally:
        gc.enable()
    return (begins * 1e6 + sum(layers)) / len(layers), layers


@contextmanager
def timed_parts(clock: PartClock) -> Iterator[None]:
    with ExitStack() as stack:
        for part, owner, names in PARTS:
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, _timed(clock, part, getattr(owner, name))))
        yield


def _timed(clock: PartClock, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.enter(part)
        try:
            return call(*args, **kwargs)
        finally:
            clock.leave()

    return timed


def measure(arms: Sequence[Arm], routing: Routing, rounds: int, steps: int) -> None:
    """Every round: each arm plays the same steps, then the same once more with its parts timed."""
    for played in [routing.step() for _ in range(_BEFORE)]:
        for arm in arms:
            play(arm, routing, [played])
    for round_ in each(range(rounds), "rounds"):
        played_steps = [routing.step() for _ in range(steps)]
        for arm in rotated(arms, round_):
            mean, layers = play(arm, routing, played_steps)
            arm.mean_us.append(mean)
            arm.layers_us += layers
        for arm in rotated(arms, round_):
            clock = PartClock(time.thread_time)
            with timed_parts(clock):
                clock.enter(REST)
                play(arm, routing, played_steps)
                clock.leave()
            for part in (*(part for part, *_ in PARTS), REST):
                layers_timed = steps * routing.shape.layers
                arm.parts_us.setdefault(part, []).append(clock.seconds.get(part, 0.0) * 1e6 / layers_timed)


def found_of(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """A row an arm. ``added_us`` and ``ratio``: over `reuse`, with a router where it has one, in the same round."""
    by_name = {arm.name: arm for arm in arms}
    rows = []
    for arm in arms:
        base = by_name["reuse + router" if arm.with_router else "reuse"]
        added = [ours - theirs for ours, theirs in zip(arm.mean_us, base.mean_us, strict=True)]
        rows.append({
            "name": arm.name,
            "us_a_layer": spread_json(Spread.of(arm.mean_us), 1),
            "p95_us": round(percentile(arm.layers_us, 0.95), 1),
            "added_us": spread_json(Spread.of(added), 1),
            "ratio": geometric(arm.mean_us, base.mean_us),
            "parts_us": {part: spread_json(Spread.of(values), 1) for part, values in arm.parts_us.items()},
        })  # fmt: skip
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'µs a layer':<30}{'all':>22}{'p95':>8}{'over reuse':>24}{'ratio':>15}"]
    for row in rows:
        ratio = row["ratio"]
        lines.append(
            f"{row['name']:<30}{median_range(row['us_a_layer'], 1):>22}{row['p95_us']:>8.1f}"
            f"{median_range(row['added_us'], 1):>24}{ratio['mean']:>8.2f} ± {ratio['within']:.2f}"
        )
    names = list(rows[0]["parts_us"])
    lines.append(f"\n{'of it, medians':<30}" + "".join(f"{name:>14}" for name in names))
    lines += [
        f"{row['name']:<30}" + "".join(f"{row['parts_us'][name]['median']:>14.1f}" for name in names) for row in rows
    ]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=5), default=9, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=12, show_default=True, help="Of a round, of each policy.")
@click.option("--layers", type=click.IntRange(min=3), default=24, show_default=True)
@click.option("--experts", type=click.IntRange(min=8), default=128, show_default=True)
@click.option("--top-k", type=click.IntRange(min=1, max=8), default=8, show_default=True)
@click.option("--sequences", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--window", "windows", type=click.IntRange(min=1), multiple=True, help="Of paths.  [default: all, and 4]")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there too.")
def main(
    rounds: int, steps: int, layers: int, experts: int, top_k: int, sequences: int, windows: tuple[int, ...],
    out: Path | None,
) -> None:  # fmt: skip
    if any(os.environ.get(name) != value for name, value in _ONE_THREAD.items()):
        # numpy has its threads already: once more, with one.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.decision_cost", *sys.argv[1:]],
            {**os.environ, **_ONE_THREAD},
        )
    shape = Shape(layers, experts, top_k, sequences)
    routing = Routing(shape)
    arms = arms_of(routing.catalogue, windows or (layers, min(4, layers)))
    machine = describe_machine(cache_folder())
    click.echo(f"{machine['processor']}, one thread; {layers} layers × {experts} experts, top-{top_k}, "
               f"{sequences} decoding sequences, {rounds} rounds of {steps} steps")  # fmt: skip
    measure(arms, routing, rounds, steps)
    rows = found_of(arms)
    click.echo(table(rows))
    added = {row["name"]: row["added_us"]["median"] for row in rows}
    foreseen = {name: added[name] for name in added if name.startswith("duoserve")}
    for name, value in foreseen.items():
        click.echo(f"{name}: {value:.1f} µs over reuse, aim ≤ {AIM_US:g}: {'met' if value <= AIM_US else 'missed'}")
    figures = {
        "predict_us_a_layer": added[f"duoserve, window {windows[0] if windows else layers}"],
        "aim_us": AIM_US,
        "shape": vars(shape) | {"rounds": rounds, "steps": steps},
        "machine": machine,
        "rows": rows,
    }
    if out is not None:
        out.write_text(json.dumps(figures) + "\n")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
