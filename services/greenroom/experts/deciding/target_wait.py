"""A confined layer's wait for its own experts of the policy's target."""

from __future__ import annotations

import logging

import numpy as np

from greenroom.core.errors import TransferFailed
from greenroom.experts.bookkeeping.ledger import LOADING, RESIDENT
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.hardware import Hardware
from greenroom.experts.deciding.on_demand import OnDemandFetcher
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_policy import ExpertPolicy, Target

log = logging.getLogger(__name__)


class TargetWait:
    """eMoE, section 4. A target is fetched layer after layer, so a layer's own experts are the next to land.

    ``timeout_s``: for how long layers wait for one target, from the first wait for it. ``queue_ahead``: see
    EngineConfig.
    """

    def __init__(
        self,
        policy: ExpertPolicy,
        tiers: Tiers,
        prefetcher: Prefetcher,
        on_demand: OnDemandFetcher,
        hardware: Hardware,
        timeout_s: float,
        queue_ahead: int,
    ) -> None:
        self._policy = policy
        self._tiers = tiers
        self._prefetcher = prefetcher
        self._on_demand = on_demand
        self._hardware = hardware
        self._timeout_s = timeout_s
        self._queue_ahead = queue_ahead
        self._target: Target | None = None  # the newest that a layer has waited for, and until when one may
        self._until = 0.0

    def wait(self, layer: int) -> None:
        """Until the target's experts of this layer have landed, or can not get a slot.

        Layers go on without them once the time is over, or after one of them could not be fetched.
        """
        span = self._policy.catalogue.spans[layer]
        state = self._tiers.device.state[span]
        while (target := self._policy.target) is not None and target.tier is Tier.DEVICE:
            if target is not self._target:
                self._target, self._until = target, self._hardware.now() + self._timeout_s
                self._on_demand.forget_failures()
            missing = target.wanted[span] & (state != RESIDENT)
            if not np.count_nonzero(missing) or self._hardware.now() >= self._until:
                return
            self._prefetcher.pump()
            if not np.count_nonzero(missing & (state == LOADING)) and self._tiers.moving < self._queue_ahead:
                return
            try:
                self._on_demand.wait_for((np.flatnonzero(missing) + span.start).tolist())
            except TransferFailed as error:
                self._until = self._hardware.now()
                log.warning("layers go on without some of the experts that were to be kept: %s", error)
