"""Where the tokens of a task type are routed: by forecasts, else a profile, else what was seen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.allocation import Shares, shares_of
from greenroom.policies.base.array_types import Ids
from greenroom.policies.base.events import LayerRouting
from greenroom.policies.base.expert_keys import Catalogue

MOST_TASKS = 64


def popularity_of(catalogue: Catalogue, profile: ModelProfile, task: str | None = None) -> Shares:
    """The profile's popularity as shares of every key; without a ``task`` the mean over all of its tasks.

    Raises InvalidConfig where the profile is of other experts than the catalogue.
    """
    if (profile.layers, profile.experts) != (catalogue.layers, int(catalogue.experts_per_layer.max())):
        theirs = f"{profile.layers} layers of {profile.experts} experts"
        ours = f"{catalogue.layers} layers of {int(catalogue.experts_per_layer.max())}"
        raise InvalidConfig("profile", f"{profile.model} ({theirs})", f"one of this model, which has {ours}")
    tables = np.array([profile.popularity(name) for name in ([task] if task is not None else profile.tasks)])
    return shares_of(catalogue, tables.mean(axis=0)[catalogue.layer_of, catalogue.index_of])


SENSITIVITIES = ("graded", "binary")
_OF_ALL = 0.1
"""The mean over all tasks has this weight in a task's losses, since few prompts of each task were run."""
_LITTLE = 0.001
"""Of a smaller share of a layer's tokens, the worth of one rests on too few."""


def worth_of_picks(catalogue: Catalogue, profile: ModelProfile, task: str | None = None) -> NDArray[np.float64] | None:
    """``[N]``: the sensitivity s of Eq. 2 as a number: what a token loses where its expert is missing.

    It is what the task's answers lose without the expert, over the expert's share of the tokens. Experts with hardly
    any tokens get their layer's mean. Weighted by the profile's shares it is 1 a layer, in the mean over all tasks.
    Without a ``task``, or for one that was not profiled: the mean over all tasks. None where the profile does not say.
    """
    every = {name: one.pick_worth for name, one in profile.tasks.items() if one.pick_worth is not None}
    if len(every) < len(profile.tasks):
        return None
    where = catalogue.layer_of, catalogue.index_of
    losses = np.array([one.loss for one in every.values()])[:, *where]  # [tasks, N]
    scale = losses.sum() / (len(losses) * catalogue.layers)
    if scale <= 0:
        return None
    mean = losses.mean(axis=0)
    loss = mean if task not in every else (1 - _OF_ALL) * losses[list(every).index(task)] + _OF_ALL * mean
    shares = popularity_of(catalogue, profile, task if task in every else None)
    of_layer = np.add.reduceat(loss, catalogue.first[:-1])[catalogue.layer_of]
    of_layer = np.maximum(of_layer, _LITTLE * scale)
    return np.asarray((loss + _LITTLE * of_layer) / ((shares + _LITTLE) * scale))


class TaskShares:
    """By task type, the product s·f of the sensitivity s and the shares f of Eq. 2, as one array.

    f comes from the task's newest forecast, else from its profile, else from where its rows were routed since the
    start, else from where all rows were. s is 0 in layers that the task is insensitive to. Elsewhere it is 1, or, where
    it is ``graded`` and the profile says so, what a pick is worth.
    """

    def __init__(self, catalogue: Catalogue, profile: ModelProfile | None, *, graded: bool = True) -> None:
        """Raises InvalidConfig for a profile of other experts."""
        self._catalogue = catalogue
        self._profile = profile
        self._graded = graded
        self._known: dict[str, Shares] = {}
        self._sensitivities: dict[str | None, Shares | float] = {}
        self._seen: dict[str, NDArray[np.float64]] = {}
        self._all_seen: NDArray[np.float64] = np.zeros(catalogue.size)
        self.popularity: Shares = np.zeros(catalogue.size) if profile is None else popularity_of(catalogue, profile)
        """The profile's, in the mean over its tasks; 0 without a profile."""
        self._of_others = self.popularity * self._sensitivity(None)
        """s·f of a task that was not profiled."""

    @property
    def tasks(self) -> list[str]:
        """Tasks with a forecast, a profile or routed rows, at most ``MOST_TASKS``; profiled ones first."""
        profiled = () if self._profile is None else tuple(self._profile.tasks)
        return list(dict.fromkeys((*profiled, *self._known, *self._seen)))[:MOST_TASKS]

    def foresee(self, task: str, weights: NDArray[np.floating]) -> None:
        """A forecast of how a task's tokens spread over all keys."""
        self._put(task, shares_of(self._catalogue, weights))

    def saw(self, routing: LayerRouting, tasks: list[str], task_of_row: Ids) -> None:
        """Rows were routed; row r is of ``tasks[task_of_row[r]]``."""
        span = self._catalogue.spans[routing.layer]
        experts = span.stop - span.start
        self._all_seen[routing.experts] += routing.rows
        if routing.picks is None or len(routing.picks) != len(task_of_row):
            return  # which row is of which task was not recorded
        cells = task_of_row[:, None] * experts + routing.picks
        counts = np.bincount(cells[routing.picks < experts], minlength=len(tasks) * experts).reshape(-1, experts)
        for task, own in zip(tasks, counts, strict=True):
            seen = self._seen.get(task)
            if seen is None:
                if len(self._seen) >= MOST_TASKS:
                    continue
                seen = self._seen[task] = np.zeros(self._catalogue.size)
            seen[span] += own

    def of(self, task: str) -> Shares | None:
        """s·f; None where nothing is known yet."""
        known = self._known.get(task)
        if known is not None:
            return known
        if self._profile is not None:
            if task not in self._profile.tasks:
                return self._of_others  # not kept: unprofiled types must not push forecasts out
            return self._put(task, popularity_of(self._catalogue, self._profile, task))
        seen = self._seen.get(task, self._all_seen)
        return shares_of(self._catalogue, seen) if seen.any() else None

    def _sensitivity(self, task: str | None) -> Shares | float:
        """``[N]``: s of Eq. 2. Computed once a task, since forecasts arrive on the thread that runs the model."""
        if self._profile is None:
            return 1.0
        known = task if task in self._profile.tasks else None
        if known not in self._sensitivities:
            self._sensitivities[known] = self._computed(self._profile, known)
        return self._sensitivities[known]

    def _computed(self, profile: ModelProfile, task: str | None) -> Shares | float:
        """``task`` None: for tasks that were not profiled."""
        worth = worth_of_picks(self._catalogue, profile, task) if self._graded else None
        insensitive = 0 if task is None else profile.insensitive_layers(task)
        if not insensitive:
            return 1.0 if worth is None else worth
        sensitive = self._catalogue.layer_of >= insensitive
        return np.where(sensitive, 1.0 if worth is None else worth, 0.0)

    def _put(self, task: str, shares: Shares) -> Shares:
        """Keep s·f, and forget the oldest task where there are too many."""
        shares = shares * self._sensitivity(task)
        shares.setflags(write=False)
        self._known.pop(task, None)
        self._known[task] = shares
        if len(self._known) > MOST_TASKS:
            del self._known[next(iter(self._known))]
        return shares
