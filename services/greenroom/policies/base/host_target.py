"""Which experts the host tier should hold, for policies that know what each is worth in the long run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target
from greenroom.policies.base.slot_sizes import SlotSizes

_STAYS = 1.5
"""To replace a member, another expert must have this many times its worth: every change is a read from the disk."""


class HostTarget:
    """As many of the worthiest experts as the device and the host hold together.

    Members on the device count as held. Where one leaves the device, the host fetches it back. There is no target
    without a host tier, or where none is ``wanted``.
    """

    def __init__(self, catalogue: Catalogue, *, wanted: bool = True) -> None:
        self._wanted = wanted
        self._sizes = SlotSizes(catalogue)
        self._places = dict.fromkeys((Tier.DEVICE, Tier.HOST), self._sizes.places(0))

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        self._places[tier] = self._sizes.places(self._sizes.within(budget_bytes))

    def of(self, worth: NDArray[np.float64], least: float, before: Target | None) -> Target | None:
        """The new target, or ``before`` where its members are the same. An expert of ``worth[N]`` not above ``least``
        is no member.
        """
        if not (self._wanted and self._places[Tier.HOST].any()):
            return before
        ranked = worth if before is None else np.where(before.wanted, _STAYS * worth, worth)
        order = np.argsort(-ranked, kind="stable")
        wanted: Mask = np.zeros(len(worth), dtype=np.bool_)
        wanted[self._sizes.placed(order, self._places[Tier.DEVICE] + self._places[Tier.HOST])] = True
        wanted &= worth > least
        if before is not None and np.array_equal(wanted, before.wanted):
            return before
        return Target(0 if before is None else before.generation + 1, wanted, tier=Tier.HOST)
