"""Next use: Belady's rule with an estimate in place of the future."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import LayerRouting, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.host_target import HostTarget
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth

NO_CHANCE = 1e-6
"""The chance of an expert that was never used. Above 0, so that of two such the one in the later layer leaves first."""


class NextUse(RankingPolicy):
    """Evicts the expert that is expected to be used least in the steps to come, a nearer use counting for more.

    An expert is used in a step with chance p: the mean of two moving averages over its layer's turns, which keep
    ``fast`` and ``slow`` of their value at each turn. Its worth is the sum of p over its layer's next turns. A turn d
    layers from here is discounted by g^d, with g such that all turns after the next count for ``horizon`` times p; in
    all the worth is g^d (p + horizon p). So of equally frequent experts the one in the layer that has just run leaves
    first. Several sequences at once make more uses in a step, but do not make it forget faster.

    ``expect`` replaces the first p by a better estimate for the next layers of this step. With ``host`` the experts of
    the highest p, as many as device and host hold together, are a target for the host tier (``HostTarget``).
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        fast: float = 0.8,
        slow: float = 0.97,
        horizon: float = 1.0,
        host: bool = False,
    ) -> None:
        """Raises InvalidConfig for a rate that is not between 0 and 1, or a horizon that is not above 0."""
        for name, rate in (("fast", fast), ("slow", slow)):
            if not 0 < rate < 1:
                raise InvalidConfig(name, rate, "between 0 and 1")
        if not horizon > 0:
            raise InvalidConfig("horizon", horizon, "above 0")
        super().__init__(catalogue)
        self._horizon = horizon
        self._averages = [(np.full(catalogue.size, NO_CHANCE), keep, (1 - keep) / 2) for keep in (fast, slow)]
        self._chance: NDArray[np.float64] = np.full(catalogue.size, 2 * NO_CHANCE)
        self._layer = catalogue.layers - 1
        step = np.log(horizon / (1 + horizon)) / catalogue.layers
        turns = (catalogue.layer_of - np.arange(catalogue.layers)[:, None] - 1) % catalogue.layers + 1
        self.discounts: NDArray[np.float64] = np.exp(step * turns)
        self._expected: NDArray[np.float64] = np.full(catalogue.size, np.nan)
        self._expecting: slice | None = None  # where it is not all NaN
        self._worth: Worth | None = None  # until something changes
        self._host_target = HostTarget(catalogue, wanted=host)

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        self._host_target.on_budget_changed(tier, budget_bytes)

    def on_step_started(self, step: Step) -> None:
        self.target = self._host_target.of(self._chance, 2 * NO_CHANCE, self.target)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._layer = routing.layer
        self._worth = None
        span = self.catalogue.spans[routing.layer]
        for average, keep, gain in self._averages:
            average[span] *= keep
            average[routing.experts] += gain
        (fast, *_), (slow, *_) = self._averages
        np.add(fast[span], slow[span], out=self._chance[span])
        if self._expecting is not None:
            self._expected[span] = np.nan
            if span.start <= self._expecting.start:
                left = slice(max(span.stop, self._expecting.start), self._expecting.stop)
                self._expecting = left if left.start < left.stop else None

    def expect(self, span: slice, chances: NDArray[np.floating]) -> None:
        """Use ``chances`` for the keys of ``span``: of a use in their layer's next turn. They hold until it has run."""
        self._expected[span] = chances
        known = self._expecting
        self._expecting = slice(
            span.start if known is None else min(known.start, span.start),
            span.stop if known is None else max(known.stop, span.stop),
        )
        self._worth = None

    def expect_nothing(self) -> None:
        """Forget what ``expect`` was told."""
        if self._expecting is not None:
            self._expected[self._expecting] = np.nan
            self._expecting = None
            self._worth = None

    def next_turn(self) -> Worth:
        """``[N]``: the chance of a use in the layer's next turn, without what ``expect`` was told."""
        return self._chance

    def expected(self) -> Worth:
        """``[N]``: the chance of a use in the layer's next turn, with what ``expect`` was told."""
        soon = self.next_turn()
        if self._expecting is None:
            return soon
        told = self._expected[self._expecting]
        found = soon.copy()
        np.copyto(found[self._expecting], told, where=~np.isnan(told), casting="same_kind")
        return found

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        if self._worth is None:
            chance = self._chance
            self._worth = (self.expected() + self._horizon * chance) * self.discounts[self._layer]
        return self._worth, None
