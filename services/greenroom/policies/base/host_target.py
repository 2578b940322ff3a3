"""Which experts the host tier should hold, for policies that know what each is worth in the long run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target

_STAYS = 1.5
"""To replace a member, another expert must have this many times its worth: every change is a read from the disk."""


class HostTarget:
    """As many of the worthiest experts as the device and the host hold together.

    Members on the device count as held. Where one leaves the device, the host fetches it back. There is no target
    without a host tier, or where none is ``wanted``.
    """

    def __init__(self, catalogue: Catalogue, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._bytes_of = catalogue.bytes_of
        self._budgets = {Tier.DEVICE: 0, Tier.HOST: 0}

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        self._budgets[tier] = budget_bytes

    def of(self, worth: NDArray[np.float64], least: float, before: Target | None) -> Target | None:
        """The new target, or ``before`` where its members are the same. An expert of ``worth[N]`` not above ``least``
        is no member.
        """
        if not (self._wanted and self._budgets[Tier.HOST]):
            return before
        ranked = worth if before is None else np.where(before.wanted, _STAYS * worth, worth)
        order = np.argsort(-ranked, kind="stable")
        fitting = np.cumsum(self._bytes_of[order]) <= sum(self._budgets.values())
        wanted: Mask = np.zeros(len(worth), dtype=np.bool_)
        wanted[order[fitting]] = True
        wanted &= worth > least
        if before is not None and np.array_equal(wanted, before.wanted):
            return before
        return Target(0 if before is None else before.generation + 1, wanted, tier=Tier.HOST)
