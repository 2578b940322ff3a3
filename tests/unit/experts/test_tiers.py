"""Moves between tiers, driven by hand: who gets the host's room, and who is woken when some is left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from greenroom.experts.arena import Arena
from greenroom.experts.carriers import Copies
from greenroom.experts.direct_io import ReadSettings
from greenroom.experts.engine import catalogue_of
from greenroom.experts.hardware import RealHardware
from greenroom.experts.ledger import Ledger, State
from greenroom.experts.mover import Carrier, Job, Mover, Outbox
from greenroom.experts.tiers import Tiers
from greenroom.policies.events import Reason, Tier
from tests.unit.experts.fakes import FakeStore, manifest

DEADLINE_S = 20.0
MANIFEST = manifest(layers=1, experts=8)


class GatedCopies(Copies):
    """Uploads wait until they are let through."""

    def __init__(self, host: Arena, device: Arena, gate: threading.Event) -> None:
        super().__init__(host, device)
        self.gate = gate

    def move(self, job: Job, part: int) -> int:
        assert self.gate.wait(DEADLINE_S)
        return super().move(job, part)


class GatedHardware(RealHardware):
    def __init__(self, reads: ReadSettings | None = None) -> None:
        super().__init__(reads)
        self.gate = threading.Event()

    def mover(self, name: str, carrier: Carrier, outbox: Outbox) -> Mover:
        if isinstance(carrier, Copies):
            carrier = GatedCopies(carrier._host, carrier._device, self.gate)
        return super().mover(name, carrier, outbox)


class Bench:
    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.store = FakeStore(MANIFEST)
        self.hardware = GatedHardware()
        self.device = Ledger(8, device_slots)
        self.host = Ledger(8, host_slots)
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


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(device_slots=4, host_slots=2)
    yield made
    made.hardware.gate.set()
    made.tiers.close()


def test_two_hops_and_the_expert_is_there(bench: Bench) -> None:
    bench.hardware.gate.set()
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


def test_who_waits_for_room_on_the_host_gets_it_by_urgency(bench: Bench) -> None:
    for key in (0, 1):
        bench.tiers.fetch(key, Reason.PREFETCH)
        bench.until((key, Tier.HOST))
    bench.tiers.fetch(2, Reason.PREFETCH)
    bench.tiers.fetch(3, Reason.ON_DEMAND)
    assert bench.tiers.waiting_ahead >= 2
    bench.hardware.gate.set()
    bench.until((3, Tier.HOST))
    assert bench.store.reads[0, 3] == 1
    bench.until((2, Tier.DEVICE), (3, Tier.DEVICE))
    assert bench.store.reads.total() == 4, "nothing is moved twice"
