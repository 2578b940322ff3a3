"""The order between disk, copies and computation on a device with queues of its own, whatever policy and budget."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core.errors import TransferFailed
from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.copying.arena import DeviceArena
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.copying.transfers import StagedReads
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import ExpertWeights, PackLayer, PackManifest, RecordLayout
from greenroom.experts.source import Arriving, Landing
from greenroom.policies.base.events import Prediction, PredictionRequest
from greenroom.policies.base.expert_policy import Target
from greenroom.policies.base.slot_sizes import SlotSizes
from tests.contract.experts.engines import POLICIES, READS, routes, sizes_of_records
from tests.examples import examples
from tests.unit.experts.fake_accelerator import FakeAccelerator
from tests.unit.experts.fakes import FakeStore, manifest
from tests.waiting import until_others

LAYERS, EXPERTS, TOP_K = 3, 6, 2
RECORD = RecordLayout.of([("w", (90, 30), "float32")])  # three pages
MANIFEST = PackManifest(
    "fake", "float32", "digest", tuple(PackLayer(f"layers.{n}", EXPERTS, TOP_K, RECORD) for n in range(LAYERS))
)


class Bench:
    """An engine over a fake accelerator (None: over RAM); computation is queued, and checked when it is done."""

    def __init__(
        self,
        policy: str,
        device_slots: int,
        host_slots: int,
        *,
        accelerator: FakeAccelerator | None,
        reads: ReadSettings = READS["whole"],
        before_read: Callable[[int, int], None] | None = None,
        pages: Sequence[int] = (),
    ) -> None:
        """``pages``: of the records of each layer; all have three, where it is empty."""
        made_of = manifest(LAYERS, EXPERTS, TOP_K, pages) if pages else MANIFEST
        catalogue = catalogue_of(made_of)
        if pages:
            sizes = SlotSizes(catalogue)
            device_slots = max(device_slots, sizes.least)
            host_slots = host_slots and max(host_slots, sizes.classes)
        self.accelerator = accelerator
        self.store = FakeStore(made_of, before_read)
        config = EngineConfig(device_slots=device_slots, host_slots=host_slots, transfer_timeout_s=20)
        hardware = RealHardware(reads, accelerator)
        self.engine = ExpertEngine(self.store, catalogue, POLICIES[policy](catalogue), config, hardware=hardware)

    def layer(self, layer: int, experts: list[int]) -> None:
        picks = np.array([[e, (e + 1) % EXPERTS] for e in experts], dtype=np.int64)
        self.engine.layer_entered(layer)
        seen = []
        ahead: list[torch.Tensor] = []
        with self.engine.routed(layer, picks) as landing:
            for expert, (weights,) in landing:
                value = 100.0 * layer + expert
                if ahead:
                    assert ahead[0] is weights, "what was said to come next"
                ahead = self._said_to_come(landing, [100.0 * layer + pick for pick in picks.ravel().tolist()])
                if self.accelerator is None:
                    assert bool((weights == value).all())
                else:
                    self.accelerator.expect(weights, value)
                seen.append(expert)
                self.engine.audit()
        assert sorted(seen) == np.unique(picks).tolist()
        assert self.engine.device.pinned == 0

    def _said_to_come(self, landing: Arriving, values: list[float]) -> list[torch.Tensor]:
        """All of it has arrived by now, or is found wrong. ``values``: of the layer's experts."""
        coming = [weights for (weights,) in landing.coming] if isinstance(landing, Landing) else []
        if self.accelerator is not None:
            self.accelerator.wrong += [
                f"{weights.flatten()[0]} was said to have arrived"
                for weights in coming
                if not np.isin(weights.numpy(), values).all()
            ]
        return coming

    def steps(self, steps: list[list[list[int]]]) -> list[str]:
        """Run them; returns what failed. The movers' failures fail the layer that needed the expert."""
        failed = []
        for layers in steps:
            rows = np.zeros(max(map(len, layers)), dtype=np.int64)
            with self.engine.step(rows, rows == 0):
                for layer, experts in enumerate(layers):
                    try:
                        self.layer(layer, experts)
                    except TransferFailed as error:
                        failed.append(str(error))
        return failed

    def close(self) -> list[str]:
        """What the device found wrong, once everything queued is done. Not before: then nothing would be late."""
        if self.accelerator is None:
            self.engine.close()
            return []
        waited = threading.get_ident() in self.accelerator.waiting_threads
        self.engine.close()
        self.accelerator.run("compute")
        self.accelerator.run("copy")
        assert not self.accelerator.locked, "all pages are given free"
        return [*self.accelerator.wrong, *(["the owner waited for the device"] if waited else [])]


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("policy", ["lru", "restless", "restless-host", "backward"])
@given(
    steps=routes,
    device_slots=st.integers(TOP_K, LAYERS * EXPERTS),
    host_slots=st.integers(0, 8),
    fills=st.booleans(),
    eagerness=st.sampled_from([(0.0, "either"), (0.2, "either"), (1.0, "compute"), (1.0, "copy")]),
    seed=st.integers(0, 99),
    pages=sizes_of_records,
)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_computation_finds_its_experts_however_late_the_device_is(
    policy: str,
    reads: str,
    steps: list[list[list[int]]],
    device_slots: int,
    host_slots: int,
    fills: bool,
    eagerness: tuple[float, str],
    seed: int,
    pages: list[int],
) -> None:
    often, which = eagerness
    eager = ("compute", "copy") if which == "either" else (which,)
    accelerator = FakeAccelerator(eagerness=often, eager=eager, seed=seed)
    bench = Bench(policy, device_slots, host_slots, accelerator=accelerator, reads=READS[reads], pages=pages)
    try:
        if fills:
            bench.engine.preload(range(device_slots))
            bench.engine.fill_host(range(LAYERS * EXPERTS))
        assert bench.steps(steps) == []
        assert bench.engine.counters.stall_seconds < 10
    finally:
        wrong = bench.close()
    assert wrong == []


@pytest.mark.parametrize(
    ("on", "policy"),
    [
        *(("ram", policy) for policy in POLICIES),
        *(("accelerator", p) for p in ("lru", "restless", "restless-host", "look-ahead", "moe-infinity")),
    ],
)
@given(
    steps=routes,
    device_slots=st.integers(TOP_K, 9),
    host_slots=st.integers(0, 4),
    fills=st.booleans(),
    reads=st.sampled_from(["parts", "deep"]),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_delays_and_failures_with_several_reads_in_flight(
    policy: str,
    on: str,
    steps: list[list[list[int]]],
    device_slots: int,
    host_slots: int,
    fills: bool,
    reads: str,
    seed: int,
) -> None:
    noise = random.Random(seed)
    pause = threading.Event()

    def trouble(layer: int, expert: int) -> None:
        pause.wait(noise.random() * 0.001)
        if noise.random() < 0.3:
            raise OSError(5, "injected")

    bench = Bench(
        policy,
        device_slots,
        host_slots,
        accelerator=FakeAccelerator(eagerness=0.1, seed=seed) if on == "accelerator" else None,
        reads=READS[reads],
        before_read=trouble,
    )
    try:
        if fills:
            bench.engine.fill_host(range(LAYERS * EXPERTS))
        failed = bench.steps(steps)
        assert all("injected" in message for message in failed), "no layer waits until its deadline"
        assert bench.engine.counters.failed_transfers >= len(failed)
        bench.engine.audit_idle()
        assert bench.engine.counters.stall_seconds < 10
    finally:
        wrong = bench.close()
    assert wrong == []


def test_what_a_layer_waits_for_lands_before_its_copy_is_done() -> None:
    """With a host tier the owner queues its work behind the copy; here no copy is ever done unless waited for."""
    accelerator = FakeAccelerator()
    bench = Bench("lru", 4, 8, accelerator=accelerator)
    bench.steps([[[0], [0], [0]]])
    bench.steps([[[0], [0], [0]]] * 3)
    moved = bench.engine.refresh_counters().bytes_by_link
    assert moved["host-device"] > moved["disk"] > 0
    assert sum(bench.store.reads.values()) == 6, "read from the disk once"
    assert bench.close() == []


class Hasty:
    """A mark that no thread waits for."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class ReadsTooEarly(DeviceArena):
    def weights(self, slot: int, layer: int) -> ExpertWeights:
        self._filled[slot] = None
        return super().weights(slot, layer)


class FillsTooEarly(DeviceArena):
    def released(self, slots: Sequence[int]) -> None:
        pass


class ReusesRamTooEarly(DeviceArena):
    def fill(self, slot: int, source: torch.Tensor) -> Mark:
        return Hasty(super().fill(slot, source))


@pytest.mark.parametrize(
    ("broken", "eagerness"), [(ReadsTooEarly, 1.0), (FillsTooEarly, 0.0), (ReusesRamTooEarly, 0.0)]
)
@pytest.mark.parametrize("host_slots", [0, 3])
def test_the_fake_device_sees_each_order_that_is_left_out(
    broken: type[DeviceArena], eagerness: float, host_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests above would prove nothing."""
    monkeypatch.setattr("greenroom.experts.bookkeeping.tiers.DeviceArena", broken)
    accelerator = FakeAccelerator(eagerness=eagerness, eager=("compute",), patience_s=0.02)
    bench = Bench("lru", 2, host_slots, accelerator=accelerator)
    bench.steps([[[0], [2], [4]], [[1], [3], [0]], [[2], [4], [1]]] * 3)
    assert any("in place of" in wrong for wrong in bench.close())


def test_the_staging_ring_is_small_and_never_runs_out() -> None:
    for reads in READS.values():
        assert StagedReads.ring_slots(reads) <= 2 * reads.depth + reads.threads + 1
    accelerator = FakeAccelerator()
    bench = Bench("restless", 12, 0, accelerator=accelerator, reads=READS["parts"])
    assert sum(accelerator.locked.values()) == StagedReads.ring_slots(READS["parts"]) * RECORD.nbytes
    assert bench.steps([[[0, 2, 4]] * LAYERS, [[1, 3, 5]] * LAYERS] * 4) == []
    assert bench.close() == []


@pytest.mark.parametrize("host_slots", [0, 3])
@pytest.mark.parametrize("reads", READS)
def test_layers_run_while_the_first_fill_goes_on(reads: str, host_slots: int) -> None:
    bench = Bench("restless", 12, host_slots, accelerator=FakeAccelerator(), reads=READS[reads])
    bench.engine.fill(range(LAYERS * EXPERTS))
    assert bench.steps([[[0, 2, 4]] * LAYERS, [[1, 3, 5]] * LAYERS] * 4) == []
    assert bench.engine.wait_filled(20.0)
    assert bench.close() == []


@pytest.mark.parametrize("on", ["ram", "accelerator"])
def test_a_long_preload_ends_with_every_expert_resident(on: str) -> None:
    """More experts than are queued at a time, through a host tier smaller than what waits for it."""
    layers = tuple(PackLayer(f"layers.{n}", 50, TOP_K, RECORD) for n in range(3))
    large = PackManifest("fake", "float32", "digest", layers)
    catalogue = catalogue_of(large)
    store = FakeStore(large)
    accelerator = FakeAccelerator() if on == "accelerator" else None
    engine = ExpertEngine(
        store,
        catalogue,
        POLICIES["lru"](catalogue),
        EngineConfig(device_slots=140, host_slots=8),
        hardware=RealHardware(READS["parts"], accelerator),
    )
    told: list[int] = []
    try:
        assert engine.preload(range(149, -1, -1), told.append) == 140
        assert sum(told) == 140
        assert engine.resident_keys().tolist() == list(range(10, 150))
        assert set(store.reads.values()) == {1}
    finally:
        engine.close()


def test_slots_of_a_device_that_held_all_are_filled_anew_after_what_read_them() -> None:
    """While all are here layers book nothing; then some leave, and come back into one another's slots."""
    accelerator = FakeAccelerator()
    bench = Bench("lru", LAYERS * EXPERTS, 0, accelerator=accelerator)
    engine = bench.engine
    engine.preload(range(LAYERS * EXPERTS))
    bench.steps([[[0, 2, 4]] * LAYERS])
    slots = engine.device.slot_of.copy()
    leaving = [0, 1, 2]
    wanted = np.ones(LAYERS * EXPERTS, dtype=bool)
    wanted[leaving] = False
    engine.policy.target = Target(0, wanted, drop_others=True)
    engine.predicted(Prediction(PredictionRequest("none", (0, 0)), "", np.empty(0, dtype=np.float32)))
    engine.policy.target = None
    engine.preload(leaving)
    assert (engine.device.slot_of[leaving] != slots[leaving]).any(), "this test can see nothing"
    assert bench.close() == []


class Withholding(FakeAccelerator):
    """Copies are queued, and none is done before ``let`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.let.set()

    def put_off(self) -> None:
        assert self.let.wait(20)

    @property
    def queued_copies(self) -> int:
        return len(self._queues["copy"])


def test_what_has_landed_and_not_arrived_is_not_said_to_come() -> None:
    """Work on it would hold up what is queued behind."""
    accelerator = Withholding()
    bench = Bench("lru", 12, LAYERS * EXPERTS, accelerator=accelerator)
    engine, here = bench.engine, np.array([[0, 1]])
    engine.preload([EXPERTS, EXPERTS + 1])
    rows, seen = np.zeros(2, dtype=np.int64), []
    before = accelerator.queued_copies
    accelerator.let.clear()

    def both_queued() -> bool:
        engine._on_demand.deliver()  # what was read to the host goes on
        return accelerator.queued_copies == before + 2

    with engine.step(rows, rows == 0), engine.routed(1, np.concatenate([here, here + 2])) as landing:
        assert isinstance(landing, Landing)
        for expert, _ in landing:
            seen.append((expert, len(landing.coming)))
            if expert == 1:
                until_others(both_queued, "both copies are queued", within_s=20)
            if len(seen) == 4:
                accelerator.let.set()
    assert seen[:2] == [(0, 1), (1, 0)]
    assert sorted(seen[2:]) == [(2, 0), (3, 0)]
    assert bench.close() == []
