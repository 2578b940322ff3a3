"""What the tiers begin with: the device layer after layer, the host the rest, behind whatever else is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from greenroom.experts.bookkeeping.ledger import Ledger, State
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from tests.contract.experts.engines import MANIFEST, SIZE
from tests.contract.experts.fill_beside_requests import assert_the_first_request_takes_no_longer
from tests.unit.experts.fakes import DEADLINE_S, FakeStore, GatedReads

DEVICE = 8


class Filled:
    """An engine whose device has been filled, and whose host is being; its disk reads one record at a time."""

    def __init__(self, host_slots: int, *held: int, failures: dict[int, int] | None = None) -> None:
        self.reads = GatedReads(*held)
        self.reads.failures.update(failures or {})
        catalogue = catalogue_of(MANIFEST)
        policy = create_policy("moe-infinity", catalogue=catalogue)
        config = EngineConfig(device_slots=DEVICE, host_slots=host_slots, transfer_timeout_s=DEADLINE_S)
        hardware = RealHardware(ReadSettings(threads=1, depth=1))
        self.engine = ExpertEngine(FakeStore(MANIFEST, self.reads), catalogue, policy, config, hardware=hardware)
        order = policy.fill_order()
        assert order is not None
        self.engine.preload(order.tolist())
        self.engine.fill_host(order.tolist())

    @property
    def host(self) -> Ledger:
        assert self.engine.host is not None
        return self.engine.host

    @property
    def on_host(self) -> list[int]:
        return [int(key) for key in np.flatnonzero(self.host.resident)]

    def layer(self, layer: int, *experts: int, let: tuple[int, ...] = ()) -> None:
        """``let``: reads that are held up until the layer's own are queued."""
        row = np.zeros(1, dtype=np.int64)
        with self.engine.step(row, row == 1), self.engine.routed(layer, np.array([experts])) as landing:
            self.reads.let(*let)
            assert sorted(expert for expert, _ in landing) == sorted(experts)

    def rest(self) -> None:
        """As a worker with nothing to do."""
        while self.engine.idle():
            assert self.engine._tiers.wait(DEADLINE_S)
            self.engine.audit(idle=True)


Make = Callable[..., Filled]


@pytest.fixture
def filled() -> Iterator[Make]:
    made: list[Filled] = []

    def make(host_slots: int, *held: int, failures: dict[int, int] | None = None) -> Filled:
        made.append(Filled(host_slots, *held, failures=failures))
        return made[-1]

    yield make
    for one in made:
        one.reads.let(*range(SIZE))
        one.engine.close()


@pytest.mark.parametrize("host_slots", [1, 4, SIZE - DEVICE, SIZE])
def test_the_device_has_the_first_layers_and_the_host_what_follows(filled: Make, host_slots: int) -> None:
    made = filled(host_slots)
    made.rest()
    assert made.engine.resident_keys().tolist() == list(range(DEVICE))
    beside = [key for key in made.on_host if key >= DEVICE]
    assert beside == list(range(DEVICE, min(SIZE, DEVICE + host_slots)))
    assert made.reads.begun == list(range(DEVICE)) + beside, "one read each, layer after layer"
    assert not made.engine.idle()


def test_a_layer_overtakes_the_fill_and_it_goes_on_behind(filled: Make) -> None:
    made = filled(SIZE - DEVICE, 8)
    made.reads.wait_begun(8)
    made.layer(2, 4, 5, let=(8,))
    assert made.reads.begun[DEVICE : DEVICE + 3] == [8, 16, 17], "what had begun, then what the layer waits for"
    made.rest()
    assert sorted(made.reads.begun) == list(range(SIZE)), "nothing is read twice"
    here = made.engine.device.resident | made.host.resident
    assert here.sum() == SIZE - 2, "what has left the device is dropped: its copy on the host had made room"


def test_what_a_layer_needs_of_the_fill_goes_on_from_there(filled: Make) -> None:
    made = filled(SIZE - DEVICE, 8)
    made.reads.wait_begun(8)
    made.layer(1, 2, 5, let=(8,))  # keys 8, which is being read, and 11, which is queued
    assert made.reads.begun[DEVICE : DEVICE + 2] == [8, 11]
    made.rest()
    assert sorted(made.reads.begun) == list(range(SIZE))


def test_the_fill_displaces_copies_alone_and_is_done_once(filled: Make) -> None:
    made = filled(4)
    made.rest()
    assert made.on_host == [8, 9, 10, 11], "none is on both tiers"
    made.layer(2, 0, 1)  # keys 12 and 13, from the disk
    assert made.engine.counters.host_prefetches_wasted == 2, "what was filled makes room as everything else does"
    assert not made.engine.idle(), "it was filled once"
    assert len(made.on_host) == 4


def test_a_read_of_the_fill_that_fails_fails_no_layer_and_is_not_tried_for_ever(filled: Make) -> None:
    made = filled(SIZE - DEVICE, failures={9: 2})  # a read is tried twice
    made.rest()
    assert made.on_host == [key for key in range(DEVICE, SIZE) if key != 9]
    assert made.reads.begun.count(9) == 2
    assert made.engine.counters.failed_transfers == 1
    made.layer(1, 3)
    assert made.engine.device.state[9] == State.RESIDENT


def test_nothing_is_filled_where_there_is_no_host_or_the_policy_has_no_order() -> None:
    catalogue = catalogue_of(MANIFEST)
    engine = ExpertEngine(
        FakeStore(MANIFEST), catalogue, create_policy("moe-infinity", catalogue=catalogue), EngineConfig(DEVICE)
    )
    try:
        engine.fill_host(range(SIZE))
        assert not engine.idle()
    finally:
        engine.close()
    ordered = {name for name in EXPERT_POLICIES if create_policy(name, catalogue=catalogue).fill_order() is not None}
    assert ordered == {"moe-infinity"}


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_first_request_takes_no_longer(tokens: int) -> None:
    def is_filled(engine: ExpertEngine, filled: bool) -> None:
        assert filled == (engine.counters.host_prefetches > 0)

    assert_the_first_request_takes_no_longer(
        tokens,
        lambda catalogue: create_policy("moe-infinity", catalogue=catalogue),
        12,
        range(12),
        lambda engine: engine.fill_host(range(engine.catalogue.size)),
        is_filled,
        upload=LinkProfile(1e10),
        host_slots=36,
    )
