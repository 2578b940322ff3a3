"""What it costs to go on with the same experts for p prompts (eMoE, section 3.3, Fig. 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import Reuse
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.profiling.model.confinement import KeptExperts
from greenroom.profiling.model.profiled_model import Asked, Subject
from greenroom.profiling.model.teacher_forcing import Forced, Given, force, perplexity

PERIODS: Final = (0, 20, 40, 60, 80)
"""The paper's p."""

TOLERANCE: Final = 0.01


def propose(perplexities: Mapping[int, float], tolerance: float = TOLERANCE) -> int:
    """The largest p up to which the perplexity stays within ``tolerance`` of that of the least p above 0; at least 1.

    p = 0 is no measure: its experts are those that the prompt itself turned out to use, which nothing can know before.
    """
    periods = sorted(period for period in perplexities if period > 0)
    best = 1
    for period in periods:
        if perplexities[period] > perplexities[periods[0]] * (1 + tolerance):
            break
        best = period
    return best


def kept_experts(catalogue: Catalogue, worth: NDArray[np.float64], slots: int) -> Mask:
    """``[keys]``: the ``slots`` experts of the largest ``worth[layers, experts]``, at least k of each layer.

    Of equals the one of the lower key. ``k`` is the router's; with less slots than all of them together it is these.
    """
    kept = np.zeros(catalogue.size, dtype=np.bool_)
    flat = np.empty(catalogue.size)
    for layer, span in enumerate(catalogue.spans):
        own = worth[layer, : span.stop - span.start]
        flat[span] = own
        kept[span.start + np.argsort(-own, kind="stable")[: int(catalogue.top_k[layer])]] = True
    order = np.argsort(-flat, kind="stable")
    others = order[~kept[order]]
    kept[others[: max(0, slots - int(kept.sum()))]] = True
    return kept


def chosen_for(tasks: Sequence[str], period: int, part: int, parts: int, random: Random) -> list[int]:
    """For each prompt, in order of arrival, the one whose experts it gets: the last of its task when they were chosen.

    Experts are chosen at one prompt for itself and its next ``period`` prompts. So a prompt comes 0 to ``period``
    prompts after the choice, each equally often. Each prompt draws such a number: in part 0 of ``parts`` from the
    lowest ones, and so on. The prompts form a ring: the last ones come before the first.
    """
    return [_last_of(tasks, place, int((part + random.random()) / parts * (period + 1))) for place in range(len(tasks))]


def _last_of(tasks: Sequence[str], place: int, ago: int) -> int:
    """The last prompt of the same task at least ``ago`` prompts before ``place``."""
    there = place - ago
    while tasks[there % len(tasks)] != tasks[place]:
        there -= 1
    return there % len(tasks)


def measure_reuse(
    subject: Subject,
    asked: Sequence[Asked],
    answers: Sequence[Sequence[int]],
    counts: Sequence[NDArray[np.int64]],
    popularity: Mapping[str, NDArray[np.float64]],
    *,
    share: float,
    seeds: int,
    seed: int,
    periods: Sequence[int] = PERIODS,
    done: Callable[[], object],
) -> Reuse:
    """``answers``: those that the prompts are given. ``counts[place]``: picks of each prompt by layer and expert, when
    all experts could be had. ``share`` of all experts is kept: those that the chosen prompt used most, beyond those
    its task uses most.
    """
    catalogue = subject.catalogue
    slots = max(int(catalogue.top_k.sum()), round(share * catalogue.size))
    kept = [_kept_for(catalogue, one, counts[place], popularity[one.task], slots) for place, one in enumerate(asked)]
    given = [Given(one.prompt_ids, answer, one.task) for one, answer in zip(asked, answers, strict=True)]
    tasks = [one.task for one in asked]
    random = Random(seed)
    found: dict[int, float] = {}
    for period in periods:
        forced: list[Forced] = []
        parts = parts_of(period, seeds)
        for part in range(parts):
            chosen = chosen_for(tasks, period, part, parts, random)
            masks: dict[int, Mask] = {}
            subject.policy.confine(KeptExperts(catalogue, masks))
            try:
                giving = _Giving(masks, [kept[place] for place in chosen])
                forced += force(subject.engine, given, begun=giving, done=done)
            finally:
                subject.policy.confine(None)
        found[period] = round(perplexity(forced), 5)
    with_all = round(perplexity(force(subject.engine, given, done=done)), 5)
    share = round(slots / catalogue.size, 4)
    return Reuse(share=share, perplexity=found, proposed_every=propose(found), with_all=with_all)


class _Giving:
    """Notes each sequence's mask as it begins."""

    def __init__(self, masks: dict[int, Mask], by_place: Sequence[Mask]) -> None:
        self._masks = masks
        self._by_place = by_place

    def __call__(self, place: int, number: int) -> None:
        self._masks[number] = self._by_place[place]


def parts_of(period: int, seeds: int) -> int:
    """How often all prompts are run for one p, each time with experts chosen at another prompt. Once for p = 0."""
    return min(seeds, period + 1)


def runs_of(seeds: int, periods: Sequence[int] = PERIODS) -> int:
    """How often ``measure_reuse`` goes through all prompts."""
    return 1 + sum(parts_of(period, seeds) for period in periods)


def _kept_for(
    catalogue: Catalogue, asked: Asked, counts: NDArray[np.int64], popularity: NDArray[np.float64], slots: int
) -> Mask:
    rows = max(1, len(asked.prompt_ids))
    return kept_experts(catalogue, counts / rows + 1e-6 * popularity, slots)
