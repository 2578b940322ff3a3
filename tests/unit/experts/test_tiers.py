"""Moves between tiers, driven by hand: which expert gets a host slot, and which is told when one is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from greenroom.experts.bookkeeping.ledger import Ledger, LedgerError, State
from greenroom.experts.bookkeeping.tiers import Tiers
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.copying.arena import Arena
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.copying.mover import Carrier, Job, Mover, Outbox
from greenroom.experts.copying.transfers import Copies
from greenroom.experts.engine import catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.policies.base.events import Reason, Tier, Transfer
from greenroom.policies.base.slot_sizes import SlotSizes
from tests.unit.experts.fake_accelerator import FakeAccelerator
from tests.unit.experts.fakes import DEADLINE_S, FakeStore, GatedReads, manifest

MANIFEST = manifest(layers=1, experts=8)
SIZES = SlotSizes(catalogue_of(MANIFEST))


class GatedCopies(Copies):
    """Uploads wait until they are let through."""

    def __init__(self, host: Arena, device: Arena, gate: GatedReads) -> None:
        super().__init__(host, device)
        self.gate = gate

    def move(self, job: Job, part: int) -> int:
        self.gate(0, job.expert)
        return super().move(job, part)


class GatedHardware(RealHardware):
    def __init__(self, reads: ReadSettings | None = None) -> None:
        super().__init__(reads)
        self.uploads = GatedReads(*range(8), experts=8)

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        if isinstance(carrier, Copies):
            carrier = GatedCopies(carrier._host, carrier._device, self.uploads)
        return super().mover(name, carrier, outbox)

    def let_all(self) -> None:
        self.uploads.let(*range(8))


class Bench:
    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.reads = GatedReads(experts=8)
        self.store = FakeStore(MANIFEST, self.reads)
        self.hardware = GatedHardware()
        self.device = Ledger(SIZES, device_slots)
        self.host = Ledger(SIZES, host_slots)
        self.tiers = Tiers(
            self.store, catalogue_of(MANIFEST), self.device, self.host,
            make_host_room=self.make_room, hardware=self.hardware,
        )  # fmt: skip

    def make_room(self, incoming: int) -> bool:
        for key in np.flatnonzero(self.host.evictable())[:1].tolist():
            self.host.evict(key)
        return self.host.free > 0

    def until(self, *landed: tuple[int, Tier]) -> None:
        """Collect until all of these moves have ended."""
        missing = set(landed)
        while missing:
            assert self.tiers.wait(DEADLINE_S), f"still missing {missing}"
            for transfer in self.tiers.collect():
                assert transfer.error is None
                missing.discard((transfer.expert, transfer.target))
            self.tiers.audit()

    def until_failed(self) -> Transfer:
        """Collect until a move has failed."""
        while True:
            assert self.tiers.wait(DEADLINE_S)
            for transfer in self.tiers.collect():
                if transfer.error is not None:
                    self.tiers.audit()
                    return transfer


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(device_slots=4, host_slots=2)
    yield made
    made.hardware.let_all()
    made.tiers.close()


def test_two_hops_and_the_expert_is_there(bench: Bench) -> None:
    bench.hardware.let_all()
    bench.tiers.fetch(5, Reason.ON_DEMAND)
    bench.until((5, Tier.HOST), (5, Tier.DEVICE))
    ((weights,),) = bench.tiers.weights([5], 0)
    assert (weights == 5).all()
    assert bench.host.state[5] == State.RESIDENT
    assert bench.store.checked == {(0, 5): 1}


def test_room_that_a_withdrawn_move_leaves_on_the_host_is_used_without_another_arrival(bench: Bench) -> None:
    bench.tiers.fetch(0, Reason.PREFETCH, 3)
    bench.until((0, Tier.HOST))  # and its upload begins, and waits
    bench.tiers.fetch(1, Reason.PREFETCH, 2)
    bench.until((1, Tier.HOST))  # its upload is queued behind
    bench.tiers.fetch(2, Reason.ON_DEMAND)
    assert not bench.store.reads[0, 2], "both host slots are held by uploads"
    assert bench.tiers.withdraw(1)
    bench.until((2, Tier.HOST))
    assert bench.tiers.moving == 2


def test_room_on_the_host_is_given_by_urgency(bench: Bench) -> None:
    for key in (0, 1):
        bench.tiers.fetch(key, Reason.PREFETCH)
        bench.until((key, Tier.HOST))
    bench.tiers.fetch(2, Reason.PREFETCH)
    bench.tiers.fetch(3, Reason.ON_DEMAND)
    assert bench.tiers.waiting_prefetches >= 2
    bench.hardware.uploads.let(0)
    bench.until((0, Tier.DEVICE), (3, Tier.HOST))
    assert not bench.store.reads[0, 2], "the one slot went to what a layer waits for"
    bench.hardware.let_all()
    bench.until((2, Tier.DEVICE), (3, Tier.DEVICE))
    assert bench.store.reads.total() == 4, "nothing is moved twice"


def test_what_is_wanted_on_the_host_goes_no_further(bench: Bench) -> None:
    bench.tiers.fetch_to_host(5, Reason.PREFETCH)
    assert (bench.tiers.moving, bench.tiers.moving_to_host) == (0, 1)
    bench.tiers.audit()
    bench.until((5, Tier.HOST))
    assert bench.tiers.moving_to_host == 0
    assert bench.host.state[5] == State.RESIDENT
    assert bench.device.state[5] == State.ABSENT
    assert (bench.device.free, bench.host.free) == (4, 1)
    bench.hardware.let_all()
    bench.tiers.fetch(5, Reason.ON_DEMAND)
    bench.until((5, Tier.DEVICE))
    assert bench.store.reads[0, 5] == 1, "from the host"


@pytest.mark.parametrize("state", ["queued", "being read", "landed"])
@pytest.mark.parametrize("reason", [Reason.ON_DEMAND, Reason.PREFETCH])
def test_a_fetch_to_the_device_goes_on_with_what_is_on_its_way_to_the_host(
    bench: Bench, state: str, reason: Reason
) -> None:
    bench.hardware.let_all()
    if state == "queued":
        bench.reads.held = {7}
        bench.tiers.fetch(7, Reason.ON_DEMAND)
        bench.reads.wait_begun(7)
    elif state == "being read":
        bench.reads.held = {5}
    bench.tiers.fetch_to_host(5, Reason.PREFETCH, 3)
    if state == "being read":
        bench.reads.wait_begun(5)
    elif state == "landed":
        assert bench.tiers.wait(DEADLINE_S)

    bench.tiers.fetch(5, reason)

    assert bench.tiers.moving_to_host == 0
    assert bench.device.state[5] == State.LOADING
    bench.tiers.audit()
    bench.reads.let(5, 7)
    bench.until((5, Tier.HOST), (5, Tier.DEVICE))
    ((weights,),) = bench.tiers.weights([5], 0)
    assert (weights == 5).all()
    assert bench.store.reads[0, 5] == 1, "one read, whatever it was asked for first"


def test_experts_bound_for_the_device_overtake_those_that_stay_on_the_host() -> None:
    made = Bench(device_slots=4, host_slots=6)
    try:
        made.hardware.let_all()
        made.reads.held = {7}
        made.tiers.fetch(7, Reason.ON_DEMAND)
        made.reads.wait_begun(7)
        for key, priority in ((1, 1), (2, 9), (3, 5)):
            made.tiers.fetch_to_host(key, Reason.PREFETCH, priority)
        made.tiers.reprioritise(3, 99)
        made.tiers.fetch(1, Reason.PREFETCH, 0.5)
        made.reads.let(7)
        made.until((1, Tier.DEVICE), (2, Tier.HOST), (3, Tier.HOST), (7, Tier.DEVICE))
        assert made.reads.begun == [7, 1, 3, 2]
    finally:
        made.hardware.let_all()
        made.tiers.close()


def test_what_waits_for_the_host_is_taken_back_the_least_urgent_first() -> None:
    made = Bench(device_slots=4, host_slots=4)
    try:
        made.hardware.let_all()
        made.reads.held = {7}
        made.tiers.fetch_to_host(7, Reason.TARGET)
        made.reads.wait_begun(7)
        for key, priority in ((1, 3), (2, 1), (3, 2)):
            made.tiers.fetch_to_host(key, Reason.PREFETCH, priority)
        assert made.host.free == 0
        assert made.tiers.withdraw_prefetch(0) is None, "none of them holds a slot on the device"
        assert [made.tiers.withdraw_to_host(0) for _ in range(4)] == [2, 3, 1, None], "the last is being read"
        assert not made.tiers.withdraw(7)
        made.tiers.audit()
        assert made.host.free == 3
        made.reads.let(7)
        made.until((7, Tier.HOST))
        assert made.reads.begun == [7]
    finally:
        made.tiers.close()


@pytest.mark.parametrize("extended", [False, True])
def test_a_read_for_the_host_that_fails_leaves_no_slot_behind(bench: Bench, extended: bool) -> None:
    bench.reads.failures[5] = 2
    bench.reads.held = {5}
    bench.tiers.fetch_to_host(5, Reason.PREFETCH)
    bench.reads.wait_begun(5)
    if extended:
        bench.tiers.fetch(5, Reason.ON_DEMAND)
    bench.reads.let(5)
    transfer = bench.until_failed()
    assert (transfer.expert, transfer.target) == (5, Tier.HOST)
    assert transfer.reason is (Reason.ON_DEMAND if extended else Reason.PREFETCH)
    assert (bench.device.free, bench.host.free) == (4, 2)
    assert (bench.tiers.moving, bench.tiers.moving_to_host) == (0, 0)
    assert bench.reads.begun == [5, 5], "tried once more, by one job"


def test_a_prefetch_that_found_no_room_on_the_host_can_be_taken_back(bench: Bench) -> None:
    for key in (0, 1):
        bench.tiers.fetch(key, Reason.ON_DEMAND)
        bench.until((key, Tier.HOST))
    bench.tiers.fetch(2, Reason.PREFETCH, 5)
    bench.tiers.fetch(3, Reason.PREFETCH, 1)
    assert bench.tiers.short_of_host_room
    assert bench.tiers.withdraw(2)
    assert bench.tiers.withdraw_prefetch(0) == 3
    assert not bench.tiers.short_of_host_room
    assert bench.device.free == 2
    bench.tiers.audit()
    bench.hardware.let_all()
    bench.until((0, Tier.DEVICE), (1, Tier.DEVICE))
    assert bench.store.reads.total() == 2


class BrokenCopy:
    """A mark that is kept from being reached, and then is not reached after all."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def reached(self) -> bool:
        return False

    def wait(self) -> None:
        assert self._gate.wait(DEADLINE_S)
        raise RuntimeError("the copy is lost")


class BreaksCopies(FakeAccelerator):
    """``broken``: copies are lost, which is told once ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = True
        self.gate = threading.Event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        return BrokenCopy(self.gate) if self.broken else super().copy(target, source, after)


@pytest.fixture(params=[0, 2], ids=["staged", "from the host"])
def lossy(request: pytest.FixtureRequest) -> Iterator[tuple[Tiers, BreaksCopies]]:
    accelerator = BreaksCopies()
    tiers = Tiers(
        FakeStore(MANIFEST), catalogue_of(MANIFEST), Ledger(SIZES, 4),
        Ledger(SIZES, request.param) if request.param else None,
        make_host_room=lambda incoming: False, hardware=RealHardware(accelerator=accelerator),
    )  # fmt: skip
    yield tiers, accelerator
    accelerator.gate.set()
    tiers.close()


def test_a_landed_expert_is_resident_only_once_its_copy_has_ended(lossy: tuple[Tiers, BreaksCopies]) -> None:
    tiers, accelerator = lossy
    tiers.fetch(5, Reason.ON_DEMAND)
    tiers.device.pin(np.array([5]))
    while not tiers.landed:
        assert tiers.wait(DEADLINE_S)
        assert [transfer.target for transfer in tiers.collect()] in ([], [Tier.HOST])
    assert tiers.computable([4, 5]) == [False, True]
    assert tiers.device.state[5] == State.LOADING
    tiers.audit()
    accelerator.gate.set()
    assert tiers.wait(DEADLINE_S)
    (transfer,) = tiers.collect()
    assert transfer.error == "RuntimeError: the copy is lost"
    assert tiers.lost_copies == {5: transfer.error}
    assert tiers.computable([5]) == [False]
    assert (tiers.device.state[5], tiers.device.free, tiers.moving) == (State.ABSENT, 4, 0)
    tiers.release(np.array([5]))
    tiers.audit()
    accelerator.broken = False
    tiers.fetch(5, Reason.ON_DEMAND)
    while not tiers.device.resident[5]:
        assert tiers.wait(DEADLINE_S)
        tiers.collect()
    tiers.audit()


def test_a_lost_copy_ahead_of_need_costs_itself_alone(lossy: tuple[Tiers, BreaksCopies]) -> None:
    tiers, accelerator = lossy
    accelerator.gate.set()
    tiers.fetch(5, Reason.PREFETCH)
    ended: list[Transfer] = []
    while not any(transfer.error for transfer in ended):
        assert tiers.wait(DEADLINE_S)
        ended += tiers.collect()
    assert ended[-1].expert == 5
    assert tiers.lost_copies == {}, "no layer can have computed with it"
    assert tiers.device.free == 4
    tiers.audit()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_the_audit_finds_an_expert_that_is_resident_without_its_bytes(bench: Bench, tier: Tier) -> None:
    ledger = bench.device if tier is Tier.DEVICE else bench.host
    ledger.reserve(6)
    ledger.arrived(6)
    with pytest.raises(LedgerError, match=r"experts \[6\] are booked as resident, and other bytes lie in their slots"):
        bench.tiers.audit()
