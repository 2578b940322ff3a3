"""What an engine does to an expert policy, in short words, for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import LayerRouting, Phase, Reason, Step, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy


def keys_of(experts: Iterable[int]) -> Keys:
    """Read-only, as nothing that a policy is given may be written to."""
    keys = np.array(list(experts), dtype=np.int64)
    keys.setflags(write=False)
    return keys


def mask_of(catalogue: Catalogue, experts: Iterable[int]) -> Mask:
    mask = np.zeros(catalogue.size, dtype=np.bool_)
    mask[keys_of(experts)] = True
    mask.setflags(write=False)
    return mask


def step_of(*sequences: int, number: int = 0, phase: Phase = Phase.DECODE) -> Step:
    return Step("pool", number, keys_of(sequences), np.full(len(sequences), phase, dtype=np.uint8))


def routing_of(catalogue: Catalogue, experts: Iterable[int], *, layer: int = 0) -> LayerRouting:
    """One row that uses these keys in this order."""
    keys = keys_of(experts)
    return LayerRouting(catalogue, step_of(0), layer, keys, keys_of([1] * len(keys)))


def transfer_of(
    expert: int, *, reason: Reason = Reason.ON_DEMAND, target: Tier = Tier.DEVICE, error: str | None = None
) -> Transfer:
    return Transfer(expert, Tier.DISK, target, reason, error)


class Bench:
    """Drives one policy and remembers which expert is where, as an engine's ledger would."""

    def __init__(self, policy: ExpertPolicy) -> None:
        self.policy = policy
        self.catalogue = policy.catalogue
        self.inside: dict[Tier, set[int]] = {Tier.DEVICE: set(), Tier.HOST: set()}

    def use(self, *experts: int, layer: int = 0) -> None:
        """The layer's router picked these; those that are missing arrive on demand."""
        self.policy.on_layer_routed(routing_of(self.catalogue, experts, layer=layer))
        for expert in experts:
            if expert not in self.inside[Tier.DEVICE]:
                self.arrive(expert)

    def arrive(self, *experts: int, reason: Reason = Reason.ON_DEMAND, tier: Tier = Tier.DEVICE) -> None:
        for expert in experts:
            self.inside[tier].add(expert)
            self.policy.on_transfer_done(transfer_of(expert, reason=reason, target=tier))

    def evict(self, *experts: int, tier: Tier = Tier.DEVICE) -> None:
        self.inside[tier] -= set(experts)
        self.policy.on_evicted(tier, keys_of(experts))

    def request(
        self,
        bytes_needed: int = 1,
        *,
        among: Iterable[int] | None = None,
        tier: Tier = Tier.DEVICE,
        reason: Reason = Reason.ON_DEMAND,
        incoming: Iterable[int] = (),
    ) -> VictimRequest:
        inside = self.inside[tier]
        evictable = inside if among is None else set(among)
        return VictimRequest(
            tier,
            bytes_needed,
            mask_of(self.catalogue, evictable),
            mask_of(self.catalogue, inside),
            reason,
            keys_of(incoming),
        )

    def victims(
        self, bytes_needed: int = 1, *, among: Iterable[int] | None = None, tier: Tier = Tier.DEVICE
    ) -> list[int]:
        return [int(key) for key in self.policy.victims(self.request(bytes_needed, among=among, tier=tier))]
