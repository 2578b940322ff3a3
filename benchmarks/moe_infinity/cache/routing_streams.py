"""The routing that caches are compared on, each with what policies learn from other sequences of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.inputs.bundled_routing import record_routing
from benchmarks.moe_infinity.calibration import TARGETS
from benchmarks.moe_infinity.synthetic_routing import MIXES, Shape, drawn
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.demo.tasks import TASKS, Sample, sample
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact
from greenroom.predictor.kinds.eamc.members import choose_members
from greenroom.predictor.kinds.reuse.fit import FitOptions, fit
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.activation_matrices import activation_matrices

BUNDLED: Final = "bundled model"
REAL_TOKENS: Final = 30_000
CURVE_GB: Final = (4, 8, 15, 24, 40)
_FAVOUR = 0.7


@dataclass(frozen=True, eq=False)
class Stream:
    """Routing to replay. ``slots``: the cache sizes; ``main``: the size of the figures with aims.

    ``artifacts``: learnt from sequences that are not in ``trace``. A random world has its ``seed``, and ``shares`` as
    in ``synthetic_routing.Drawn``.
    """

    name: str
    trace: RoutingTrace
    slots: tuple[int, ...]
    main: int
    at_once: tuple[int, ...]
    artifacts: tuple[Artifact, ...]
    seed: int = 0
    tokens: int | None = None
    shares: NDArray[np.float32] | None = None


def synthetic_stream(
    shape: Shape, seed: int, sequences: int, learnt: int, *, curve: bool, options: FitOptions | None = None
) -> Stream:
    """A random world. ``curve``: with the cache sizes of Fig. 11, 4 to 40 GB, beside the main one.

    ``options``: of the fit of `reuse`.
    """
    mix, target = MIXES[shape.name], TARGETS[shape.name]
    world = drawn(shape, mix, learnt + sequences, seed=seed)
    sizes = {target.slots, *(round(gb * target.slots / target.gb) for gb in (CURVE_GB if curve else ()))}
    return Stream(
        shape.name, world.trace.part(learnt), tuple(sorted(sizes)), target.slots, (mix.at_once,),
        artifacts_of(world.trace.part(0, learnt), options), seed, shares=world.shares[learnt:],
    )  # fmt: skip


def bundled_stream(sequences: int, learnt: int, at_once: int) -> Stream:
    """The bundled model's routing, recorded now.

    First come prompts of all tasks alike, to learn from; then a mix that drifts from task to task.
    """
    recorded = record_routing([*_evenly(learnt), *shifting(sequences, seed=2)])
    experts = recorded.catalogue().size
    sizes = tuple(round(experts * share) for share in (1 / 6, 1 / 4, 1 / 3, 1 / 2, 3 / 4))
    learnt_from = artifacts_of(recorded.part(0, learnt))
    return Stream(BUNDLED, recorded.part(learnt), sizes, sizes[2], (at_once,), learnt_from)


def real_stream(path: Path, tokens: int = REAL_TOKENS) -> Stream:
    """The first rows of a recorded routing at a third of its experts; policies learn from the sequences after them."""
    trace = RoutingTrace.load(path)
    first = int(np.searchsorted(trace.seq_starts, tokens + _running_over(trace, tokens)))
    third = trace.catalogue().size // 3
    return Stream(
        trace.model or path.stem, trace.part(0, first), (third,), third, (1, 8), artifacts_of(trace.part(first)),
        tokens=tokens,
    )  # fmt: skip


def _running_over(trace: RoutingTrace, tokens: int) -> int:
    """Rows of sequences that have begun when ``tokens`` are used, eight at once. Nothing is learnt from them."""
    return 8 * int(np.diff(trace.seq_starts).max())


def shifting(count: int, *, seed: int) -> list[Sample]:
    """Prompts of a mix that favours one task after the other, changing little by little, once around."""
    random = Random(seed)
    asked = []
    for number in range(count):
        place = number / count * len(TASKS)
        favoured = int(place) if random.random() >= place % 1 else int(place) + 1
        task = TASKS[favoured % len(TASKS)] if random.random() < _FAVOUR else random.choice(TASKS)
        asked.append(sample(task, seed=seed, index=number))
    return asked


def artifacts_of(trace: RoutingTrace, options: FitOptions | None = None) -> tuple[Artifact, ...]:
    """The EAMC and the coefficients of `reuse`, as a worker is given them."""
    catalogue, widths = trace.catalogue(), tuple(trace.experts_per_layer.tolist())
    matrices = activation_matrices(trace)
    members = matrices[choose_members(widths, matrices)]
    eamc = EamcFile(model=trace.model, experts_per_layer=widths, sequences=trace.sequences, matrices=members)
    return artifact_of(catalogue, eamc, "eamc"), artifact_of(catalogue, fit(trace, options), "reuse")


def _evenly(count: int) -> Sequence[Sample]:
    return [sample(TASKS[number % len(TASKS)], seed=1, index=number) for number in range(count)]
