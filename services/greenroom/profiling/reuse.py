"""What it costs to go on with the same experts for p prompts (eMoE, section 3.3, Fig. 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import Reuse
from greenroom.policies.arrays import Mask
from greenroom.policies.catalogue import Catalogue
from greenroom.profiling.confinement import KeptExperts
from greenroom.profiling.forced import Forced, Given, force, perplexity
from greenroom.profiling.subject import Asked, Subject

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


def chosen_for(tasks: Sequence[str], period: int, offset: int) -> list[int]:
    """For each prompt, in order of arrival, the one whose experts it gets: the last of its task at the time.

    Experts are chosen at the first prompt, at prompt ``offset``, and then at a prompt for its next ``period`` ones and
    itself. Before a task had any prompt, at its first one.
    """
    window = period + 1
    current: dict[str, int] = {}
    latest: dict[str, int] = {}
    chosen = []
    for place, task in enumerate(tasks):
        latest[task] = place
        if place == 0 or (place >= offset and (place - offset) % window == 0):
            current = dict(latest)
        chosen.append(current.setdefault(task, place))
    return chosen


def offsets_of(period: int, count: int) -> list[int]:
    """Up to ``count`` different places in a window at which the choosing begins, evenly apart."""
    return sorted({repeat * (period + 1) // count for repeat in range(count)})


def measure_reuse(
    subject: Subject,
    asked: Sequence[Asked],
    answers: Sequence[Sequence[int]],
    counts: Sequence[NDArray[np.int64]],
    popularity: Mapping[str, NDArray[np.float64]],
    *,
    share: float,
    seeds: int,
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
    found: dict[int, float] = {}
    for period in periods:
        forced: list[Forced] = []
        for offset in offsets_of(period, seeds):
            chosen = chosen_for([one.task for one in asked], period, offset)
            masks: dict[int, Mask] = {}
            subject.policy.confine(KeptExperts(catalogue, masks))
            try:
                forced += force(
                    subject.engine,
                    given,
                    begun=_Giving(masks, [kept[place] for place in chosen]),
                    done=done,
                )
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


def runs_of(seeds: int, periods: Sequence[int] = PERIODS) -> int:
    """How often ``measure_reuse`` goes through all prompts."""
    return 1 + sum(len(offsets_of(period, seeds)) for period in periods)


def _kept_for(
    catalogue: Catalogue, asked: Asked, counts: NDArray[np.int64], popularity: NDArray[np.float64], slots: int
) -> Mask:
    rows = max(1, len(asked.prompt_ids))
    return kept_experts(catalogue, counts / rows + 1e-6 * popularity, slots)
