"""Fetching what a layer waits for, and booking what lands."""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.errors import TransferFailed
from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.ledger import LedgerError, State
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.hardware import Hardware
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Reason
from greenroom.policies.base.expert_policy import ExpertPolicy

_ABSENT, _LOADING = int(State.ABSENT), int(State.LOADING)


class OnDemandFetcher:
    """On-demand fetches of one engine. ``timeout_s``: how long a layer waits without anything landing."""

    def __init__(
        self,
        policy: ExpertPolicy,
        tiers: Tiers,
        evictor: Evictor,
        prefetcher: Prefetcher,
        counters: Counters,
        hardware: Hardware,
        timeout_s: float,
    ) -> None:
        self._policy = policy
        self._tiers = tiers
        self._evictor = evictor
        self._prefetcher = prefetcher
        self._counters = counters
        self._hardware = hardware
        self._timeout_s = timeout_s
        self._hears_arrivals = "on_transfer_done" in policy.hooks
        self._failed: dict[int, str] = {}

    def begin(self, keys: list[int], running: Keys) -> bool:
        """Begin to fetch as many of the missing as room can be found for; True: some have found none yet.

        ``running``: all experts of the layer, which make room for each other last. Raises TransferFailed.
        """
        self._raise_failure_of(keys)
        device = self._tiers.device
        absent = []
        for key, state in zip(keys, device.state[keys].tolist(), strict=True):
            if state == _ABSENT:
                absent.append(key)
            elif state == _LOADING and self._tiers.queued_prefetch(key) is not None:
                self._tiers.hurry(key)
        if not absent:
            return False
        self._prefetcher.withdraw_all_but(len(absent))
        if device.free < len(absent):
            self._evictor.on_demand(len(absent) - device.free, absent, running)
        begun = absent[: device.free]
        for key in begun:
            self._counters.on_demand_fetches += 1
            self._evictor.goes_to_device(key)
            self._tiers.fetch(key, Reason.ON_DEMAND)
        return len(begun) < len(absent)

    def deliver(self) -> None:
        """Book what the movers have finished and tell the policy."""
        for transfer in self._tiers.collect():
            if transfer.error is None:
                if self._hears_arrivals:
                    self._policy.on_transfer_done(transfer)
                continue
            self._counters.failed_transfers += 1
            if self._evictor.unused_on_host[transfer.expert]:  # it was to stay there: nobody waits for it on the device
                self._evictor.unused_on_host[transfer.expert] = False
            else:
                self._evictor.unused[transfer.expert] = False
                self._failed[transfer.expert] = transfer.error
            self._policy.on_transfer_failed(transfer)

    def wait_for(self, wanted: Iterable[int]) -> None:
        """Wait until something lands. Raises TransferFailed where one of ``wanted`` can not be had."""
        self._raise_failure_of(wanted)
        if not self._tiers.moving:
            raise LedgerError("a layer waits for experts, and nothing moves")
        begin = self._hardware.now()
        landed = self._tiers.wait(self._timeout_s)
        self._counters.stall_seconds += self._hardware.now() - begin
        self.deliver()
        self._raise_failure_of(wanted)
        if not landed:
            raise TransferFailed(f"no expert has landed for {self._timeout_s:g} s")

    def step_begins(self) -> None:
        """What was computed until now has been used or discarded."""
        self._tiers.void.clear()

    def confirm(self) -> None:
        """Wait until whoever has landed has arrived. Raises TransferFailed where the bytes of one that had landed since
        the step began did not come: what was computed with it is void.
        """
        while self._tiers.landed and not self._tiers.void:
            if not self._tiers.wait(self._timeout_s):
                raise TransferFailed(f"no copy to the device has ended for {self._timeout_s:g} s")
            self.deliver()
        for key, text in self._tiers.void.items():
            raise self._failure_of(key, text)

    def forget_failures(self) -> None:
        """What failed before may be tried again."""
        self._failed.clear()

    def _raise_failure_of(self, wanted: Iterable[int]) -> None:
        for key in wanted if self._failed else ():
            if key in self._failed:
                raise self._failure_of(key, self._failed[key])

    def _failure_of(self, key: int, text: str) -> TransferFailed:
        catalogue = self._policy.catalogue
        layer, index = int(catalogue.layer_of[key]), int(catalogue.index_of[key])
        return TransferFailed(f"expert {index} of MoE layer {layer} could not be had: {text}")
