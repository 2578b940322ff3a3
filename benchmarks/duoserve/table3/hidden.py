"""Predictors that read hidden states: routers run ahead, maps of the residual stream, and all that is blended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.duoserve.table3.predictors import Array
from benchmarks.harness.inputs.bundled_rows import RecordedRows, as_seen
from benchmarks.harness.inputs.split_routing import World
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.moe.routing.residual_maps import ResidualMaps, chances
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import (
    ROUTER,
    UNKNOWN_TASK,
    LayerRouting,
    Prediction,
    PredictionRequest,
    SequenceEnd,
    SequenceInfo,
    Step,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.duoserve.policy import DuoServe

Answers = Mapping[tuple[int, int], Array]
"""By layer and how many layers ahead: of all measured tokens ``[T, experts of the layer]``, between 0 and 1."""
MOST_AHEAD = 3


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """What was recorded, as the rows of a world's two parts ``[T, layers, H]``."""

    recorded: RecordedRows
    fitted: NDArray[np.float16]
    measured: NDArray[np.float16]

    @classmethod
    def of(cls, recorded: RecordedRows, world: World) -> Hidden:
        split = world.fitted.tokens
        return cls(recorded, recorded.rows[:split], recorded.rows[split:])

    def by_routers(self) -> dict[tuple[int, int], Array]:
        return self._answers(self.recorded.routers.weights)

    def by_maps(self, file: ResidualFile) -> dict[tuple[int, int], Array]:
        maps = ResidualMaps(file, dtype=torch.bfloat16)

        def weights(layer: int, target: int, rows: torch.Tensor) -> Array:
            return chances(maps.logits(layer, target, target + 1, rows).numpy())

        return self._answers(weights)

    def _answers(self, weights: Callable[[int, int, torch.Tensor], Array]) -> dict[tuple[int, int], Array]:
        layers = self.measured.shape[1]
        with torch.inference_mode():
            return {
                (target, target - layer): weights(layer, target, as_seen(self.measured[:, layer]))
                for layer in range(layers)
                for target in range(layer + 1, min(layer + 1 + MOST_AHEAD, layers))
            }


class ByAnswers:
    """What was answered, as it is."""

    def __init__(self, world: World, answers: Answers, ahead: int) -> None:
        self._world, self._answers, self._ahead = world, answers, ahead

    def scores(self, layer: int) -> Array:
        return self._answers[layer, self._ahead][self._world.rows]


def by_policy(world: World, reuse: ReuseFile, path: PathFile, answers: Answers) -> dict[tuple[int, int], Array]:
    """What `duoserve` itself tells its retention of the next layers' experts: the policy runs through the measured
    sequences, one at a time, and ``answers`` are what the hook answers on decoding rows. Its blends learn as they go.
    """
    trace = world.measured
    catalogue = trace.catalogue()
    policy = DuoServe(catalogue)
    for file in (reuse, path):
        policy.on_artifact_swapped(artifact_of(catalogue, file, file.KIND))
    found = {key: np.zeros_like(each) for key, each in answers.items() if key[1] <= 2}
    row = 0
    for number, traced in enumerate(trace.steps(concurrent=1)):
        for sequence in traced.started:
            policy.on_sequence_started(SequenceInfo(sequence, UNKNOWN_TASK))
        step = Step(catalogue.pool, number, traced.sequences, traced.phases)
        policy.on_step_started(step)
        for predictor in policy.predictors:
            predictor.on_step_started(step)
        for layer in range(catalogue.layers):
            routing = LayerRouting.from_picks(catalogue, step, layer, traced.picks[:, layer].astype(np.int64))
            _foreseen(policy, routing, answers, row)
            for target in range(layer + 1, min(layer + 3, catalogue.layers)) if step.rows == 1 else ():
                found[target, target - layer][row] = policy.reuse.expected()[catalogue.spans[target]]
        for sequence in traced.ended:
            policy.on_sequence_ended(sequence, SequenceEnd.FINISHED)
        row += step.rows
    return found


def _foreseen(policy: DuoServe, routing: LayerRouting, answers: Answers, row: int) -> None:
    """A layer as the engine runs it: routed, asked, answered."""
    policy.on_layer_routed(routing)
    requests: dict[str, PredictionRequest] = {request.kind: request for request in policy.take_requests()}
    for predictor in policy.predictors:
        predictor.on_layer_routed(routing)
        if predictor.kind in requests and (own := predictor.answer(requests[predictor.kind])) is not None:
            policy.on_prediction(own)
    request = requests.get(ROUTER)
    if request is not None and routing.step.rows == 1:
        values = [answers[target, target - routing.layer][row] for target in range(*request.layers)]
        policy.on_prediction(Prediction(request, "", np.concatenate(values)[None]))


def cost_us(hidden: Hidden, files: Mapping[str, ResidualFile], catalogue: Catalogue, rounds: int) -> dict[str, float]:
    """Microseconds a layer, to answer two layers ahead for one row: medians of ``rounds`` in which all take turns."""
    layers = range(catalogue.layers - 2)
    rows = [as_seen(hidden.measured[:1, layer]) for layer in layers]
    routers = hidden.recorded.routers

    def ask_routers() -> None:
        for layer in layers:
            for target in (layer + 1, layer + 2):
                routers.weights(layer, target, rows[layer])

    def asking(maps: ResidualMaps) -> Callable[[], None]:
        def ask() -> None:
            for layer in layers:
                chances(maps.logits(layer, layer + 1, layer + 3, rows[layer]).numpy())

        return ask

    arms = {"router": ask_routers}
    arms |= {name: asking(ResidualMaps(file, dtype=torch.bfloat16)) for name, file in files.items()}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, ask in arms.items():
                began = time.perf_counter()
                ask()
                taken[name].append(1e6 * (time.perf_counter() - began) / len(layers))
    return {name: float(np.median(each)) for name, each in taken.items()}
