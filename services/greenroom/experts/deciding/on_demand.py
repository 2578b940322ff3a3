"""Fetches what a layer waits for, and books what lands."""

from __future__ import annotations

from collections.abc import Iterable

from greenroom.core.errors import TransferFailed
from greenroom.experts.bookkeeping.counters import Counters
from greenroom.experts.bookkeeping.ledger import ABSENT, LOADING, LedgerError
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.hardware import Hardware
from greenroom.experts.deciding.evictor import Evictor
from greenroom.experts.deciding.first_fill import FirstFill
from greenroom.experts.deciding.prefetcher import Prefetcher
from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Reason
from greenroom.policies.base.expert_policy import ExpertPolicy


class OnDemandFetcher:
    """On-demand fetches of one engine. ``timeout_s``: how long a layer waits without anything landing."""

    def __init__(
        self,
        policy: ExpertPolicy,
        tiers: Tiers,
        evictor: Evictor,
        prefetcher: Prefetcher,
        first_fill: FirstFill,
        counters: Counters,
        hardware: Hardware,
        timeout_s: float,
    ) -> None:
        self._policy = policy
        self._tiers = tiers
        self._evictor = evictor
        self._prefetcher = prefetcher
        self._first_fill = first_fill
        self._counters = counters
        self._hardware = hardware
        self._timeout_s = timeout_s
        self._hears_arrivals = "on_transfer_done" in policy.hooks
        self._failed: dict[int, str] = {}  # by expert, why

    def begin(self, keys: list[int], running: Keys, most: int | None = None) -> bool:
        """Begin to fetch the missing ones of ``keys``, experts of one layer, as many as slots can be freed for. True:
        some must wait.

        ``running``: experts of the layer, which are evicted for each other last. ``most``: so many at most. Raises
        TransferFailed.
        """
        self._raise_failure_of(keys)
        device = self._tiers.device
        absent = []
        for key, state in zip(keys, device.state[keys].tolist(), strict=True):
            if state == ABSENT:
                absent.append(key)
            elif state == LOADING and self._tiers.queued_prefetch(key) is not None:
                self._tiers.hurry(key)
        if not absent:
            return False
        now = absent if most is None else absent[: max(0, most)]
        size_class = device.size_class(absent[0])
        self._prefetcher.free_device_slots(size_class, len(now))
        if device.free_in(size_class) < len(now):
            self._evictor.free_on_demand(len(now) - device.free_in(size_class), now, running)
        begun = now[: device.free_in(size_class)]
        for key in begun:
            self._counters.running.on_demand_fetches += 1
            self._tiers.fetch(key, Reason.ON_DEMAND)
        return len(begun) < len(absent)

    def deliver(self) -> None:
        """Book what the movers have finished, and tell the policy."""
        for transfer in self._tiers.collect():
            self._first_fill.arrived(transfer)
            if transfer.error is None:
                if self._hears_arrivals:
                    self._policy.on_transfer_done(transfer)
                continue
            self._counters.failed_transfers += 1
            self._prefetcher.failed(transfer.expert)
            host = self._tiers.host
            if host is not None and host.prefetches.unused[transfer.expert]:
                host.prefetches.fail(transfer.expert)  # it was to stay on the host: no layer waits for it
            else:
                self._tiers.device.prefetches.fail(transfer.expert)
                self._failed[transfer.expert] = transfer.error
            self._policy.on_transfer_failed(transfer)
        self._first_fill.settle()

    def wait_for(self, wanted: Iterable[int]) -> None:
        """Wait until something lands. Raises TransferFailed if one of ``wanted`` can not be fetched."""
        self._raise_failure_of(wanted)
        if not self._tiers.moving:
            raise LedgerError("a layer waits for experts, and nothing moves")
        begin = self._hardware.now()
        landed = self._tiers.wait(self._timeout_s)
        self._counters.running.stall_seconds += self._hardware.now() - begin
        self.deliver()
        self._raise_failure_of(wanted)
        if not landed:
            raise TransferFailed(f"no expert has landed for {self._timeout_s:g} s")

    def begin_step(self) -> None:
        """Forget lost copies: what was computed with them before this step has been discarded."""
        self._tiers.lost_copies.clear()

    def confirm_step(self) -> None:
        """Wait until the bytes of every expert that has landed have arrived.

        Raises TransferFailed if those of an expert that landed in this step did not: what the step computed is void.
        """
        while self._tiers.landed and not self._tiers.lost_copies:
            if not self._tiers.wait(self._timeout_s):
                raise TransferFailed(f"no copy to the device has ended for {self._timeout_s:g} s")
            self.deliver()
        for key, text in self._tiers.lost_copies.items():
            raise self._failure_of(key, text)

    def forget_failures(self) -> None:
        """Let experts whose fetch has failed be tried again."""
        self._failed.clear()

    def _raise_failure_of(self, wanted: Iterable[int]) -> None:
        for key in wanted if self._failed else ():
            if key in self._failed:
                raise self._failure_of(key, self._failed[key])

    def _failure_of(self, key: int, text: str) -> TransferFailed:
        catalogue = self._policy.catalogue
        layer, index = int(catalogue.layer_of[key]), int(catalogue.index_of[key])
        return TransferFailed(f"expert {index} of MoE layer {layer} could not be had: {text}")
