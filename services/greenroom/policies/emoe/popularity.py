"""Experts by the popularity that is forecast for the present tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import LayerRouting, Prediction, SequenceEnd, SequenceInfo, Step, Tier, Transfer
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target
from greenroom.policies.base.ranking import RankingPolicy
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.base.victim_selection import Worth
from greenroom.policies.prefetching.prefetching_policy import RETENTIONS

POPULARITY: Final = "popularity"
"""The kind of the predictor service's forecasts: for one task type, how often each expert of every layer is picked."""

_STAYS = 1.5
"""To replace a member of the target, another expert must have this many times its worth."""

_MOST_TASKS = 64


class Popularity(RankingPolicy):
    """Keeps and fetches the experts that the present tasks will route most tokens to, as forecast by task type.

    eMoE (§3.3, §3.4): a task's tokens, prompt and expected answer, go to expert i in its forecast share f_i (Eq. 2,
    summed over the tasks). The experts with the most tokens are loaded. They are a target for ``share`` of the device;
    the rest is for what the forecast misses. Without a forecast, and among equals, ``retention`` decides. Where no
    present task has a forecast, all forecasts count alike.
    """

    def __init__(self, catalogue: Catalogue, *, share: float = 0.75, retention: str = "next-use") -> None:
        """Raises InvalidConfig for a share that is not from 0 to 1, UnknownName for an unknown retention."""
        if not 0 <= share <= 1:
            raise InvalidConfig("share", share, "from 0 to 1")
        if retention not in RETENTIONS:
            raise UnknownName("retention", retention, RETENTIONS)
        super().__init__(catalogue)
        self.retention: RankingPolicy = RETENTIONS[retention](catalogue)
        self._share = share
        self._sizes = SlotSizes(catalogue)
        self._budget = 0
        self._forecasts: dict[str, NDArray[np.float64]] = {}
        self._tokens: dict[int, tuple[str, int]] = {}
        self._mixed: NDArray[np.float64] | None = None
        self._mixed_by: Mapping[str, float] = {}
        self._stale = False

    # -- requests, forecasts and routing ---------------------------------------------------------------------------

    def on_sequence_queued(self, sequence: SequenceInfo) -> None:
        self._tokens[sequence.sequence] = sequence.task, sequence.prompt_tokens + sequence.expected_tokens
        self._stale = True

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        if self._tokens.pop(sequence, None) is not None:
            self._stale = True

    def on_prediction(self, prediction: Prediction) -> None:
        asked, values = prediction.request, prediction.values
        if asked.kind != POPULARITY or asked.task is None or values.shape != (self.catalogue.size,):
            return
        self._forecasts.pop(asked.task, None)
        self._forecasts[asked.task] = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        if len(self._forecasts) > _MOST_TASKS:
            del self._forecasts[next(iter(self._forecasts))]
        self._mix()

    def on_step_started(self, step: Step) -> None:
        if self._stale and self._forecasts and self._weights() != self._mixed_by:
            self._mix()  # only where the weights changed: a mix favours the present members of the target

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self.retention.on_layer_routed(routing)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self.retention.on_transfer_done(transfer)

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        if tier is Tier.DEVICE and budget_bytes != self._budget:
            self._budget = budget_bytes
            if self._forecasts:
                self._mix()

    # -- decisions -------------------------------------------------------------------------------------------------

    def worth(self, tier: Tier) -> tuple[Worth, Worth | None]:
        own, tie = self.retention.worth(tier)
        return (own, tie) if self._mixed is None else (self._mixed, own)

    def _mix(self) -> None:
        self._stale = False
        weights = self._mixed_by = self._weights()
        self._mixed = np.zeros(self.catalogue.size)
        for task, weight in weights.items():
            self._mixed += weight * self._forecasts[task]
        self.target = self._target(self._mixed)

    def _weights(self) -> Mapping[str, float]:
        """Tokens of the present tasks that have a forecast; 1 for every forecast where there is no such task."""
        tokens: dict[str, float] = {}
        for task, count in self._tokens.values():
            if task in self._forecasts:
                tokens[task] = tokens.get(task, 0.0) + max(1, count)
        return tokens or dict.fromkeys(self._forecasts, 1.0)

    def _target(self, worth: NDArray[np.float64]) -> Target | None:
        before = self.target
        ranked = worth if before is None else np.where(before.wanted, _STAYS * worth, worth)
        order: Keys = np.argsort(-ranked, kind="stable")
        places = self._sizes.places(self._sizes.within(int(self._share * self._budget)))
        wanted: Mask = np.zeros(len(worth), dtype=np.bool_)
        wanted[self._sizes.placed(order, places)] = True
        wanted &= worth > 0
        if not wanted.any() and before is None:
            return None
        if before is not None and np.array_equal(wanted, before.wanted):
            return before
        return Target(0 if before is None else before.generation + 1, wanted)
