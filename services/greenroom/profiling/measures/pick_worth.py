"""What a router's pick is worth: eMoE's sensitivity s (Eq. 2) by layer and expert, instead of 0 or 1.

Measured on given answers: how much less probable they become where one expert is missing and its rows go to the next
best. A prompt that never picks the expert loses nothing. So only prompts that do are run again, and only some of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import PickWorth
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.profiling.model.confinement import LackingOne
from greenroom.profiling.model.profiled_model import Asked, ProfileFailed, Subject
from greenroom.profiling.model.teacher_forcing import Forced, Given, force


def measure_pick_worth(
    subject: Subject,
    asked: Sequence[Asked],
    answers: Sequence[Sequence[int]],
    counts: Sequence[NDArray[np.int64]],
    *,
    prompts: int,
    seed: int,
    done: Callable[[], object],
) -> dict[str, PickWorth]:
    """By task. ``answers``: the undisturbed ones; ``counts[place]``: ``[layers, experts]``, the prompts' own picks.
    ``prompts``: the most prompts of a task that run without an expert. ``done`` is called ``turns_of`` times.

    Raises ProfileFailed where rows can not be confined.
    """
    catalogue, random = subject.catalogue, Random(seed)
    given = [Given(one.prompt_ids, answer, one.task) for one, answer in zip(asked, answers, strict=True)]
    places = {task: [one.place for one in asked if one.task == task] for task in sorted({one.task for one in asked})}
    undisturbed = force(subject.engine, given, done=done)
    loss = {task: np.zeros(counts[0].shape) for task in places}
    left = turns_of(catalogue, [len(own) for own in places.values()], prompts) - len(given)
    for layer, experts in enumerate(catalogue.experts_per_layer.tolist()):
        if experts <= catalogue.top_k[layer]:
            continue
        for task, own in places.items():
            tokens = sum(len(given[place].answer_ids) for place in own)
            users = [[place for place in own if counts[place][layer, expert]] for expert in range(experts)]
            runs = [(place, expert) for expert, of in enumerate(users) for place in chosen(of, prompts, random)]
            forced = _force_lacking(subject, layer, [(given[place], expert) for place, expert in runs], done)
            left -= len(runs)
            for (place, expert), lacking in zip(runs, forced, strict=True):
                lost = float((undisturbed[place].log_probabilities - lacking.log_probabilities).sum())
                share = len(users[expert]) / min(len(users[expert]), prompts)
                loss[task][layer, expert] += share * lost / tokens
    for _ in range(left):
        done()
    return {task: PickWorth(loss=_rounded(np.maximum(values, 0.0))) for task, values in loss.items()}


def chosen(users: Sequence[int], prompts: int, random: Random) -> list[int]:
    return sorted(random.sample(users, prompts)) if len(users) > prompts else list(users)


def turns_of(catalogue: Catalogue, prompts_by_task: Sequence[int], prompts: int) -> int:
    """How often ``measure_pick_worth`` calls ``done``: as if each prompt picked every expert."""
    return sum(prompts_by_task) + catalogue.size * sum(min(prompts, own) for own in prompts_by_task)


def _force_lacking(
    subject: Subject, layer: int, runs: Sequence[tuple[Given, int]], done: Callable[[], object]
) -> list[Forced]:
    """Each without the one expert of the layer."""
    if not runs:
        return []
    lacking: dict[int, int] = {}

    def begun(place: int, number: int) -> None:
        lacking[number] = runs[place][1]

    subject.policy.confine(LackingOne(subject.catalogue, layer, lacking))
    try:
        forced = force(subject.engine, [given for given, _ in runs], begun=begun, done=done)
    finally:
        confined = subject.policy.confine(None)
    if not confined:
        raise ProfileFailed("no router of this model asked where its rows may go: they can not be disturbed")
    return forced


def _rounded(table: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(float(value), 6) for value in row) for row in table)
