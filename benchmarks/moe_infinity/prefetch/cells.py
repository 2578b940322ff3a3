"""One policy on one routing, link and device: what it prefetched in time, and how long layers waited."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.moe_infinity.prefetch.prefetch_alone import PrefetchAlone
from benchmarks.moe_infinity.simulated_models import Model
from benchmarks.moe_infinity.synthetic_routing import trace_of
from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.prefetching.next_layer import TracedTopK
from greenroom.policies.registry import create_policy
from greenroom.policies.reuse.chances import REUSE
from greenroom.predictor.kinds.config import CAPACITY
from greenroom.predictor.kinds.eamc.members import choose_members
from greenroom.predictor.kinds.reuse.fit import FitOptions, fit
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.traces.activation_matrices import activation_matrices

PERCENTILES = (50, 95, 99)

_SCALED = 64
"""Experts and links are simulated so many times smaller, which changes no time: what is fetched ahead is read in pieces
of some MiB, and an expert is to be one copy, as it is in the paper (§5.3)."""


@dataclass(frozen=True, slots=True)
class World:
    """Sequences of one seed. The first ``learnt`` make the collection of up to ``capacity`` members (0: none).

    The ``served`` after them are replayed, the first ``rows`` of each. ``fitted``: `reuse` has coefficients from the
    learnt ones too, not those it has without.
    """

    model: Model
    seed: int
    learnt: int
    served: int
    capacity: int = CAPACITY
    rows: int | None = None
    fitted: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its options, as it is called in tables."""

    label: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Cell:
    """``link``: bytes a second. ``alone``: nothing is kept but what was fetched ahead (PrefetchAlone)."""

    world: World
    arm: Arm
    link: float
    at_once: int
    alone: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """``recall``: share of the used experts that had been fetched ahead, of all and of those used in decoding; None if
    others were kept too.

    ``ready``: share of them that nothing waited for. ``waits_ms``: percentiles of the expert-ready latency over all
    used experts; ``layers_ms``: of the sum over a layer.
    """

    recall: float | None
    recall_decoding: float | None
    ready: float
    mean_wait_ms: float
    waits_ms: tuple[float, ...]
    layers_ms: tuple[float, ...]
    token_ms: float
    prefetches: int
    wasted: int


def measure(cell: Cell, go_on: Callable[[], object] = lambda: None) -> Measured:
    """Replay the cell. ``go_on`` is called after each step; what it raises ends the replay."""
    world, model = cell.world, cell.world.model
    ready = prepared(world)
    setup = TimedReplay(
        ready.served, model.expert_bytes // _SCALED, LinkProfile(cell.link / _SCALED),
        ComputeProfile(layer_s=model.layer_s),
        queue_ahead=math.ceil(model.a_layer(cell.link)) + 2,  # wants are looked at around layers alone
    )  # fmt: skip
    policy = create_policy(cell.arm.policy, catalogue=setup.catalogue(), options=cell.arm.options)
    if ready.members is not None:
        policy.on_artifact_swapped(ready.members)
    if world.fitted and REUSE in policy.artifacts:
        policy.on_artifact_swapped(_coefficients(world))
    if isinstance(policy, TracedTopK):
        policy.learn(ready.uses)
    alone = PrefetchAlone(policy) if cell.alone else None
    waits: list[list[float]] = []

    def steps() -> Any:
        for step in ready.served.steps(concurrent=cell.at_once):
            yield step
            go_on()

    timed = setup.run(alone or policy, steps(), model.slots, waits=waits)
    blocked = np.array(list(chain(*waits)))
    return Measured(
        recall=None if alone is None else alone.covered / alone.used,
        recall_decoding=None if alone is None else alone.covered_decoding / max(1, alone.used_decoding),
        ready=float((blocked == 0).mean()),
        mean_wait_ms=float(blocked.mean() * 1e3),
        waits_ms=tuple((np.percentile(blocked, PERCENTILES) * 1e3).tolist()),
        layers_ms=tuple((np.percentile(list(map(sum, waits)), PERCENTILES) * 1e3).tolist()),
        token_ms=timed.seconds * 1e3 / timed.tokens,
        prefetches=timed.prefetches,
        wasted=timed.prefetches_wasted,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What is ``served``, and what is known before: the collection, and ``uses[N]``, the number of rows that used each
    expert."""

    served: RoutingTrace
    members: Artifact | None
    uses: Counts


@lru_cache(maxsize=2)
def prepared(world: World) -> Prepared:
    learnt, served = _drawn(world.model, world.seed, world.learnt, world.served, world.rows)
    matrices = activation_matrices(learnt)
    artifact = None
    if world.capacity:
        members = choose_members(learnt.experts_per_layer.tolist(), matrices, capacity=world.capacity)
        artifact = Artifact(EAMC, "1", {MATRICES: matrices[members]})
    return Prepared(served, artifact, matrices.sum(axis=0).astype(np.int64))


@lru_cache(maxsize=2)
def _coefficients(world: World) -> Artifact:
    """Without followers: they take twice as long to fit and are worth nothing if tokens are drawn independently."""
    learnt, _ = _drawn(world.model, world.seed, world.learnt, world.served, world.rows)
    return artifact_of(learnt.catalogue(), fit(learnt, FitOptions(followers=False)), "fitted")


@lru_cache(maxsize=2)
def _drawn(model: Model, seed: int, learnt: int, served: int, rows: int | None) -> tuple[RoutingTrace, RoutingTrace]:
    if model.trace is None:
        trace = trace_of(model.shape, model.mix, learnt + served, seed=seed)
    else:
        trace = RoutingTrace.load(model.trace)
        order = np.random.default_rng(seed).permutation(trace.sequences)
        trace = of_sequences(trace, order[: learnt + served].tolist())
    rest = trace.part(learnt)
    return trace.part(0, learnt), of_sequences(rest, range(rest.sequences), rows)


def of_sequences(trace: RoutingTrace, sequences: Iterable[int], rows: int | None = None) -> RoutingTrace:
    """These, in this order, the first ``rows`` of each."""
    spans = [np.arange(*trace.seq_starts[[one, one + 1]])[:rows] for one in sequences]
    taken = np.concatenate(spans)
    return replace(
        trace,
        experts=trace.experts[taken],
        seq_starts=np.concatenate(([0], np.cumsum([len(span) for span in spans]))),
        phase=None if trace.phase is None else trace.phase[taken],
        step=None,
        task=None,
        request=None,
        arrival=None,
    )


def by_world(cells: Sequence[Cell]) -> list[Cell]:
    """In an order in which a process draws and clusters each world once."""
    return sorted(cells, key=lambda cell: (cell.world.model.name, cell.world.seed, cell.world.capacity))
