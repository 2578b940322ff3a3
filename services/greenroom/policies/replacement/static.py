"""A fixed set of experts: the baseline for policies that look at the requests."""

from __future__ import annotations

import numpy as np

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.model_profile import ModelProfile
from greenroom.policies.base.allocation import Allocation, Shares
from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target
from greenroom.policies.base.fidelity import FIDELITIES
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.task_shares import SENSITIVITIES, popularity_of, worth_of_picks
from greenroom.policies.base.victim_selection import Worth


class Static(RankingPolicy):
    """Wants the same experts all the time, at least the router's k of each layer.

    By default these are the most popular ones of the ``profile``, all its tasks alike, as many as the device holds.
    Without a profile they are the first of every layer. With ``sensitivity`` "graded" popularity is weighted by what
    the profile says that a pick is worth. With ``share`` they are that share of all experts, drawn at random by
    ``seed``. Other experts leave first. The set leaves room for one row's misses in a layer, except with ``fidelity``
    "paper", which has no misses.
    """

    only_ahead = True

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        profile: ModelProfile | None = None,
        fidelity: str = "exact",
        share: float | None = None,
        seed: int = 0,
        sensitivity: str = "binary",
    ) -> None:
        """Raises InvalidConfig for a share that is not above 0 and at most 1, or a profile of other experts, and
        UnknownName for an unknown sensitivity.
        """
        if share is not None and not 0 < share <= 1:
            raise InvalidConfig("share", share, "above 0, at most 1")
        if seed < 0:
            raise InvalidConfig("seed", seed, "a whole number from 0")
        if fidelity not in FIDELITIES:
            raise InvalidConfig("fidelity", fidelity, f"allowed: {', '.join(FIDELITIES)}")
        if sensitivity not in SENSITIVITIES:
            raise UnknownName("sensitivity", sensitivity, SENSITIVITIES)
        super().__init__(catalogue)
        if share is not None:
            self._worth: Shares = 1.0 - np.random.default_rng(seed).random(catalogue.size)
        elif profile is not None:
            graded = worth_of_picks(catalogue, profile) if sensitivity == "graded" else None
            self._worth = popularity_of(catalogue, profile) * (1.0 if graded is None else graded)
        else:
            self._worth = (1.0 / (1.0 + catalogue.index_of)).astype(np.float64)
        self._allocation = Allocation(catalogue)
        sizes = self._allocation.sizes
        self._most = sizes.places(sizes.experts if share is None else sizes.within(round(share * sizes.all_bytes)))
        self._spare = 0 * sizes.picked if fidelity == "paper" else sizes.picked

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        if tier is not Tier.DEVICE:
            return
        sizes = self._allocation.sizes
        slots = sizes.within(budget_bytes)
        room = sizes.places(slots) if slots == sizes.experts else sizes.places(slots) - self._spare
        none = np.zeros(self.catalogue.size, dtype=np.bool_)
        places = np.maximum(0, np.minimum(room, self._most))
        wanted = self._allocation.choose(self._worth, places, here=none, popularity=self._worth)
        if self.target is None or not np.array_equal(wanted, self.target.wanted):
            self.target = Target(0 if self.target is None else self.target.generation + 1, wanted)

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        if tier is not Tier.DEVICE or self.target is None:
            return self._worth, None
        return self._worth + 2.0 * self.target.wanted, None
