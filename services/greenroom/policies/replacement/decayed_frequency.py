"""Decayed frequency: an older use counts for less."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import LayerRouting, Step, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.host_target import HostTarget
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.victim_selection import Worth

_LARGEST = 1e100
"""Sums are rescaled to a unit of 1 when the unit exceeds this."""


class Decayed(RankingPolicy):
    """Evicts the expert of the least decayed frequency, Σ ``decay`` ^ (uses of any expert since).

    It lies between LFU (``decay`` near 1) and LRU (near 0). A decay that suits one sequence forgets too fast for
    several, which make more uses in a step; ``next-use`` counts steps instead. With ``host`` the most frequent experts,
    as many as device and host hold together, are a target for the host tier (``HostTarget``).
    """

    def __init__(self, catalogue: Catalogue, *, decay: float = 0.9998, host: bool = False) -> None:
        """Raises InvalidConfig for a decay that is not between 0 and 1."""
        if not 0 < decay < 1:
            raise InvalidConfig("decay", decay, "between 0 and 1")
        super().__init__(catalogue)
        # Instead of decaying every sum at each use, each use counts for more than the one before it.
        self._sums: NDArray[np.float64] = np.zeros(catalogue.size, dtype=np.float64)
        self._decay = decay
        self._powers = _powers_up_to(64, decay)
        self._unit = 1.0
        self._host_target = HostTarget(catalogue, wanted=host)

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        self._host_target.on_budget_changed(tier, budget_bytes)

    def on_step_started(self, step: Step) -> None:
        self.target = self._host_target.of(self._sums, 0.0, self.target)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self.use(routing.experts)

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        return self._sums, None

    def use(self, experts: Keys) -> None:
        """Count a use of each, in this order."""
        count = len(experts)
        if count >= len(self._powers):
            self._powers = _powers_up_to(2 * count, self._decay)
        self._sums[experts] += self._powers[:count] * self._unit
        self._unit *= float(self._powers[count])
        if self._unit > _LARGEST:
            self._sums /= self._unit
            self._unit = 1.0


def _powers_up_to(count: int, decay: float) -> NDArray[np.float64]:
    """``decay`` ^ -i for i from 0 to ``count`` - 1: the weight of a use against that of the i-th use before it."""
    powers: NDArray[np.float64] = np.exp(np.minimum(np.arange(count) * -math.log(decay), math.log(_LARGEST)))
    return powers
