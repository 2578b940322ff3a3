"""The device's first fill goes on behind layers: they overtake it, take its slots back, and read nothing twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from greenroom.experts.bookkeeping.ledger import State
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.policies.base.expert_policy import Prefetch, Target
from greenroom.replay.simulation.simulated_hardware import LinkProfile, SimulatedHardware
from tests.contract.experts.engines import EXPERTS, MANIFEST, POLICIES, SIZE, run_steps
from tests.contract.experts.fill_beside_requests import assert_the_first_request_takes_no_longer
from tests.matrices import matrix
from tests.unit.experts.fakes import DEADLINE_S, FakeStore, GatedReads

DEVICE = 8


class Filling:
    """An engine whose device is being filled, with the experts of the lowest keys first; its disk reads one record at a
    time. ``held``: reads that wait."""

    def __init__(
        self,
        *held: int,
        slots: int = DEVICE,
        host_slots: int = 0,
        policy: str = "lru",
        failures: dict[int, int] | None = None,
    ) -> None:
        self.reads = GatedReads(*held)
        self.reads.failures.update(failures or {})
        catalogue = catalogue_of(MANIFEST)
        self.policy = POLICIES[policy](catalogue)
        config = EngineConfig(device_slots=slots, host_slots=host_slots, transfer_timeout_s=DEADLINE_S)
        hardware = RealHardware(ReadSettings(threads=1, depth=1))
        self.engine = ExpertEngine(FakeStore(MANIFEST, self.reads), catalogue, self.policy, config, hardware=hardware)
        self.engine.fill(range(SIZE))
        if held:
            self.reads.wait_begun(held[0])

    def layer(self, layer: int, *experts: int, let: tuple[int, ...] = ()) -> None:
        """``let``: reads that are held up until the layer's own are queued."""
        row = np.zeros(1, dtype=np.int64)
        with self.engine.step(row, row == 1), self.engine.routed(layer, np.array([experts])) as landing:
            self.reads.let(*let)
            seen = []
            for expert, (weights,) in landing:
                assert (weights == 100 * layer + expert).all()
                self.engine.audit()
                seen.append(expert)
            assert sorted(seen) == sorted(experts)

    def rest(self) -> list[int]:
        """As a worker with nothing to do. Returns the residents."""
        assert self.engine.wait_filled(DEADLINE_S)
        self.engine.audit(idle=True)
        assert self.engine.filled.is_set()
        assert self.engine.fill_progress.left == 0
        return [int(key) for key in self.engine.resident_keys()]

    def settle(self) -> None:
        """Until nothing moves any more."""
        while self.engine._tiers.moving:
            assert self.engine._tiers.wait(DEADLINE_S)
            self.engine.idle()


Make = Callable[..., Filling]


@pytest.fixture
def filling() -> Iterator[Make]:
    made: list[Filling] = []

    def make(*held: int, slots: int = DEVICE, host_slots: int = 0, policy: str = "lru", **more: object) -> Filling:
        made.append(Filling(*held, slots=slots, host_slots=host_slots, policy=policy, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.reads.let(*range(SIZE))
        one.engine.close()


@pytest.mark.parametrize("slots", [2, DEVICE, SIZE])
@pytest.mark.parametrize("host_slots", [0, 1, 4])
def test_it_fills_every_slot_in_order_and_is_over_once(filling: Make, slots: int, host_slots: int) -> None:
    made = filling(slots=slots, host_slots=host_slots)
    assert made.rest() == list(range(slots))
    assert made.reads.begun == list(range(slots))
    assert made.engine.fill_progress[1:3] == (slots, slots * PAGE_BYTES)
    assert made.engine.counters.prefetches == 0
    assert made.engine.counters.evictions == 0
    assert not made.engine.idle()


def test_a_layer_overtakes_it_and_it_goes_on_behind(filling: Make) -> None:
    made = filling(0)
    assert not made.engine.filled.is_set()
    made.layer(2, 4, 5, let=(0,))
    assert made.reads.begun[:3] == [0, 16, 17], "what had begun, then what the layer waits for"
    assert made.rest() == [*range(DEVICE - 2), 16, 17]
    assert made.engine.counters.evictions == 0, "a slot that is to be filled is given back, and no expert leaves"
    assert max(map(made.reads.begun.count, range(SIZE))) == 1
    assert made.engine.fill_progress.experts == DEVICE - 2


def test_what_a_layer_needs_of_it_is_read_once(filling: Make) -> None:
    made = filling(0)
    made.layer(0, 0, 3, let=(0,))  # key 0 is being read, key 3 is queued
    assert made.reads.begun[:2] == [0, 3]
    assert made.engine.counters.on_demand_fetches == 0
    assert made.rest() == list(range(DEVICE))
    assert sorted(made.reads.begun) == list(range(DEVICE))


def test_a_slot_that_is_being_filled_is_not_free(filling: Make) -> None:
    made = filling(0, slots=2)
    assert made.engine.device.free == 0
    made.layer(1, 0, 1, let=(0,))  # one in the slot that key 1 was to have, the other once key 0 has come and left
    assert made.engine.counters.evictions == 1
    # Key 0 or key 6 has made room: the one whose landing or use was booked first, which the reading thread decides.
    assert made.rest() in ([6, 7], [0, 7])
    assert sorted(made.reads.begun) == [0, 6, 7]


def test_what_a_policy_wants_overtakes_it_too(filling: Make) -> None:
    made = filling(0)
    priority = np.zeros(SIZE, dtype=np.float32)
    priority[[5, 17]] = 0.5, 1.0  # one that is queued for the fill, and one that is not
    made.policy.prefetch = Prefetch(1, priority)
    made.engine.layer_entered(0)
    made.engine.audit()
    made.reads.let(0)
    assert made.rest() == [*range(DEVICE - 1), 17]
    assert made.reads.begun[:3] == [0, 17, 5]
    assert made.engine.counters.prefetches == 2
    assert made.engine.counters.evictions == 0


def test_a_target_that_drops_all_others_ends_it(filling: Make) -> None:
    made = filling(0)
    wanted = np.zeros(SIZE, dtype=np.bool_)
    wanted[[2, 12, 13]] = True
    made.policy.target = Target(1, wanted, drop_others=True)
    made.engine.layer_entered(0)
    made.engine.audit()
    made.reads.let(0)
    made.rest()
    while not made.engine.device.resident[[2, 12, 13]].all():
        assert made.engine._tiers.wait(DEADLINE_S)
        made.engine.layer_entered(0)
    assert sorted(made.reads.begun) == [0, 2, 12, 13]


def test_a_read_that_fails_is_left_out_and_fails_no_layer(filling: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "greenroom.experts.deciding.first_fill"):
        made = filling(failures={1: 2})  # a read is tried twice
        assert made.rest() == [key for key in range(DEVICE + 1) if key != 1]
    assert ["goes on without an expert" in record.message for record in caplog.records] == [True, False]
    assert "1 could not be read" in caplog.records[-1].message
    assert "8 experts, 32 KiB in" in caplog.records[-1].message
    assert made.engine.counters.failed_transfers == 1
    made.layer(0, 1)
    assert made.engine.device.state[1] == State.RESIDENT


def test_a_member_of_a_target_that_can_not_be_read_is_tried_again_only_for_another_target(filling: Make) -> None:
    made = filling(failures={3: 4})  # a read is tried twice
    wanted = np.zeros(SIZE, dtype=np.bool_)
    wanted[[3, 12]] = True
    made.policy.target = Target(1, wanted)
    made.rest()
    for _ in range(5):
        made.engine.layer_entered(0)
        made.settle()
    assert made.reads.begun.count(3) == 4, "by the fill, and once more by the target that came after"
    assert made.engine.device.resident[12]
    made.policy.target = Target(2, wanted)
    made.engine.layer_entered(0)
    made.settle()
    assert made.engine.device.resident[3]


def test_closing_in_the_middle_ends_it(filling: Make) -> None:
    made = filling(0)
    assert sorted(made.engine.keys_to_remember()) == list(range(DEVICE)), "of a start that was cut short all is kept"
    (mover,) = made.engine.movers
    closing = threading.Thread(target=made.engine.close)
    closing.start()
    with mover._changed:
        assert mover._changed.wait_for(lambda: mover._closed, DEADLINE_S)
    made.reads.let(0)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert made.reads.begun == [0]


def test_who_waits_is_told_of_progress_and_not_kept_where_nothing_comes() -> None:
    """On a clock that only waiting advances: an expert a second."""
    catalogue = catalogue_of(MANIFEST)
    hardware = SimulatedHardware(LinkProfile(PAGE_BYTES))
    engine = ExpertEngine(
        FakeStore(MANIFEST), catalogue, POLICIES["lru"](catalogue), EngineConfig(DEVICE), hardware=hardware
    )
    engine.fill(range(SIZE))
    told: list[int] = []
    assert not engine.wait_filled(0.5, told.append)
    assert (hardware.now(), sum(told), engine.fill_progress.left) == (0.5, 0, DEVICE)
    assert engine.wait_filled(1.5, told.append), "each second one comes"
    assert engine.fill_progress == (0, DEVICE, DEVICE * PAGE_BYTES, float(DEVICE), 0), "at the rate of the link"
    assert sum(told) == DEVICE
    assert engine.fill_progress.describe(2 * 10**10) == (
        "8 experts, 32 KiB in 8.00 s; with what requests fetched the disk gave 2.50 GB/s"
    )
    engine.close()


@matrix(1, host_slots=(0, 3), policy=POLICIES.keys())
def test_layers_of_any_policy_run_while_it_goes_on(policy: str, host_slots: int) -> None:
    made = Filling(0, policy=policy, host_slots=host_slots)
    made.reads.let(0)
    try:
        steps = np.random.default_rng(3).integers(0, EXPERTS, (6, len(MANIFEST.layers), 2)).tolist()
        run_steps(made.engine, steps)
        assert made.engine.wait_filled(DEADLINE_S)
        made.engine.audit(idle=True)
    finally:
        made.engine.close()


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_first_request_takes_no_longer(tokens: int) -> None:
    def is_over(engine: ExpertEngine, filled: bool) -> None:
        assert engine.wait_filled(60.0)

    assert_the_first_request_takes_no_longer(
        tokens, POLICIES["lru"], 40, (), lambda engine: engine.fill(range(engine.catalogue.size)), is_over
    )
