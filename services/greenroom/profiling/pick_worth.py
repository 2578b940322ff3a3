"""What it is worth that a row gets the experts its router picks: eMoE's sensitivity s (Eq. 2), by layer and expert,
instead of 0 or 1.

How much an answer loses without an expert is the more, the more the answers hang on its layer, and the larger the
router's weight of the picks. Both are measured with given answers: a layer and seed are one pass over the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.model_profile import PickWorth
from greenroom.moe.router_weights import RouterWeights
from greenroom.policies.catalogue import Catalogue
from greenroom.profiling.confinement import RandomRouting
from greenroom.profiling.forced import Forced, Given, force
from greenroom.profiling.subject import Asked, ProfileFailed, Subject


def measure_pick_worth(
    subject: Subject,
    asked: Sequence[Asked],
    answers: Sequence[Sequence[int]],
    *,
    seeds: int,
    seed: int,
    done: Callable[[], object] = lambda: None,
) -> dict[str, PickWorth]:
    """By task. ``answers``: the undisturbed ones. Raises ProfileFailed where rows can not be confined."""
    given = [Given(one.prompt_ids, answer, one.task) for one, answer in zip(asked, answers, strict=True)]
    tasks = sorted({one.task for one in asked})
    weights = _WeightSums(subject, tasks)
    with RouterWeights(subject.engine.model.model, weights.add):
        undisturbed = force(
            subject.engine, given, begun=lambda place, number: weights.begins(number, asked[place].task), done=done
        )
    losses = np.zeros((subject.catalogue.layers, len(tasks)))
    for layer in range(subject.catalogue.layers):
        for repeat in range(seeds):
            forced = _force_without(subject, given, layer, seed + repeat, done)
            losses[layer] += _losses(undisturbed, forced, given, tasks)
    losses = np.maximum(losses / seeds, 0.0)
    return {
        task: PickWorth(
            loss=tuple(round(float(value), 5) for value in losses[:, place]),
            weight=tuple(tuple(round(float(value), 5) for value in row) for row in weights.means(place)),
        )
        for place, task in enumerate(tasks)
    }


def passes_of(catalogue: Catalogue, seeds: int) -> int:
    """How often ``measure_pick_worth`` tells of every prompt."""
    return 1 + catalogue.layers * seeds


def _force_without(
    subject: Subject, given: Sequence[Given], layer: int, seed: int, done: Callable[[], object]
) -> list[Forced]:
    """With that layer alone routed at random."""
    names: dict[int, int] = {}
    subject.policy.confine(RandomRouting(subject.catalogue, range(layer, layer + 1), seed=seed, names=names))
    try:
        forced = force(
            subject.engine, given, begun=lambda place, number: names.__setitem__(number, place), done=done
        )  # fmt: skip
    finally:
        confined = subject.policy.confine(None)
    if not confined:
        raise ProfileFailed("no router of this model asked where its rows may go: they can not be disturbed")
    return forced


def _losses(
    undisturbed: Sequence[Forced], forced: Sequence[Forced], given: Sequence[Given], tasks: Sequence[str]
) -> NDArray[np.float64]:
    """``[tasks]``: nats by which a token of the answers is less probable, on the mean."""
    lost = [one.log_probabilities - other.log_probabilities for one, other in zip(undisturbed, forced, strict=True)]
    return np.array(
        [np.concatenate([own for own, one in zip(lost, given, strict=True) if one.task == task]).mean()
         for task in tasks]
    )  # fmt: skip


class _WeightSums:
    """Adds up the weights that routers give to their picks, by task, layer and expert."""

    def __init__(self, subject: Subject, tasks: Sequence[str]) -> None:
        shape = len(tasks), subject.catalogue.layers, int(subject.catalogue.experts_per_layer.max())
        self._subject = subject
        self._places = {task: place for place, task in enumerate(tasks)}
        self._task_of: dict[int, int] = {}
        self._sums: NDArray[np.float64] = np.zeros(shape)
        self._counts: NDArray[np.float64] = np.zeros(shape)

    def begins(self, sequence: int, task: str) -> None:
        self._task_of[sequence] = self._places[task]

    def add(self, layer: int, picks: torch.Tensor, weights: torch.Tensor) -> None:
        """``[T, k]`` each, of the step that runs."""
        tasks = np.array([self._task_of[sequence] for sequence in self._subject.policy.row_sequences.tolist()])
        experts = picks.cpu().numpy()
        rows = np.repeat(tasks, experts.shape[1])
        known = experts.ravel() < self._subject.catalogue.experts_per_layer[layer]
        where = rows[known], experts.ravel()[known]
        np.add.at(self._sums[:, layer], where, weights.detach().float().cpu().numpy().ravel()[known])
        np.add.at(self._counts[:, layer], where, 1.0)

    def means(self, place: int) -> NDArray[np.float64]:
        """``[layers, experts]`` of the task at that place; of an expert that nobody picked the mean of its layer."""
        sums, counts = self._sums[place], self._counts[place]
        of_layer = sums.sum(axis=1, keepdims=True) / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        return np.asarray(np.where(counts > 0, sums / np.maximum(counts, 1), of_layer))
