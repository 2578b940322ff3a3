"""How many of a cache's misses a predictor foresees: only these are worth a prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.inputs.split_routing import World
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


class Foresight:
    """What predictors foresee of a cache's misses. An expert is fetched where its score is above one bound for all
    layers. All misses of the world's rows count, also those of the first layer, which nobody foresees.
    """

    def __init__(self, world: World, absent: Absent) -> None:
        """``absent``: see ``absent_experts``."""
        trace = world.measured
        self._away = [absent[world.rows, span] for span in trace.catalogue().spans]
        self._missed = [
            many_hot(trace.experts[world.rows, layer], away.shape[1]).astype(np.bool_) & away
            for layer, away in enumerate(self._away)
        ]
        self._scores: dict[str, list[NDArray[np.floating]]] = {}
        self._hits: dict[str, list[NDArray[np.bool_]]] = {}

    def add(self, predictor: str, layer: int, scores: NDArray[np.floating]) -> None:
        """What a predictor says of a layer, ``[rows, experts of the layer]``. Each layer once."""
        away = self._away[layer]
        self._scores.setdefault(predictor, []).append(scores[away])
        self._hits.setdefault(predictor, []).append(self._missed[layer][away])

    def found(self) -> dict[str, Foreseen]:
        """By predictor."""
        misses = int(sum(map(np.count_nonzero, self._missed)))
        return {
            name: Foreseen(at_precision(scores, self._hits[name], PRECISION) / max(misses, 1), misses)
            for name, scores in self._scores.items()
        }


def at_precision(scores: Sequence[NDArray[np.floating]], hits: Sequence[NDArray[np.bool_]], precision: float) -> int:
    """The most ``hits`` above any bound on ``scores`` above which at least the share ``precision`` are hits."""
    values = np.concatenate(list(scores))
    order = np.argsort(-values, kind="stable")
    values, right = values[order], np.cumsum(np.concatenate(list(hits))[order])
    last_of_its_score = np.append(values[1:] != values[:-1], True)[: len(values)]
    enough = last_of_its_score & (right >= precision * np.arange(1, len(right) + 1))
    return int(right[enough].max(initial=0))
