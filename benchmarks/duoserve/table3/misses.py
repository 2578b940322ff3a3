"""How many of a cache's misses a predictor foresees: only these are worth a prefetch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.duoserve.table3.predictors import Predictor
from benchmarks.duoserve.table3.worlds import World
from greenroom.policies.base.events import LayerRouting, SequenceEnd, SequenceInfo, Step
from greenroom.policies.registry import create_policy
from greenroom.predictor.kinds.expert_mlp.shares import many_hot
from greenroom.replay import RoutingTrace
from greenroom.replay.hit_rates import ReplayCache

PRECISION = 0.8
Absent = NDArray[np.bool_]


def absent_experts(
    trace: RoutingTrace, slots: int, policy: str = "next-use", go_on: Callable[[], object] = lambda: None
) -> Absent:
    """``[tokens, N]``: which experts are not in a device of ``slots`` when their layer of that token is routed.

    One sequence runs at a time, a token a step, those of prompts too. ``go_on`` is called after each step.
    """
    catalogue = trace.catalogue()
    cache = ReplayCache(create_policy(policy, catalogue=catalogue), slots)
    here = np.zeros((trace.tokens, catalogue.size), dtype=np.bool_)
    one_by_one = replace(trace, phase=None, step=None)
    for row, traced in enumerate(one_by_one.steps(concurrent=1)):
        for sequence in traced.started:
            cache.policy.on_sequence_started(SequenceInfo(sequence))
        step = Step(catalogue.pool, row, traced.sequences, traced.phases)
        cache.policy.on_step_started(step)
        for layer, span in enumerate(catalogue.spans):
            here[row, span] = cache.resident[span]
            cache.route(LayerRouting.from_picks(catalogue, step, layer, traced.picks[:, layer].astype(np.int64)))
        for sequence in traced.ended:
            cache.policy.on_sequence_ended(sequence, SequenceEnd.FINISHED)
        go_on()
    return ~here


@dataclass(frozen=True, slots=True)
class Foreseen:
    """``share`` of the ``misses``: the most that can be fetched ahead, and ``PRECISION`` of what is fetched is used."""

    share: float
    misses: int


def foreseen(world: World, absent: Absent, predictors: Mapping[str, Predictor], ahead: int) -> dict[str, Foreseen]:
    """By predictor. All misses of the rows count, also those of the first layers, which nobody foresees. An expert is
    fetched where its score is above one bound for all layers.
    """
    trace, rows = world.measured, world.rows
    spans = trace.catalogue().spans
    picked = [
        many_hot(trace.experts[rows, layer], span.stop - span.start).astype(np.bool_) & absent[rows, span]
        for layer, span in enumerate(spans)
    ]  # fmt: skip
    misses = int(sum(map(np.count_nonzero, picked)))
    found = {}
    for name, predictor in predictors.items():
        scores, hits = [], []
        for layer in range(ahead, trace.layers):
            away = absent[rows, spans[layer]]
            scores.append(predictor.scores(layer)[away])
            hits.append(picked[layer][away])
        found[name] = Foreseen(at_precision(scores, hits, PRECISION) / max(misses, 1), misses)
    return found


def at_precision(scores: Sequence[NDArray[np.floating]], hits: Sequence[NDArray[np.bool_]], precision: float) -> int:
    """The most ``hits`` above any bound on ``scores`` above which at least the share ``precision`` are hits."""
    values = np.concatenate(list(scores))
    order = np.argsort(-values, kind="stable")
    values, right = values[order], np.cumsum(np.concatenate(list(hits))[order])
    last_of_its_score = np.append(values[1:] != values[:-1], True)[: len(values)]
    enough = last_of_its_score & (right >= precision * np.arange(1, len(right) + 1))
    return int(right[enough].max(initial=0))
