"""What a policy wants on the host tier is brought there and no further, behind whatever is bound for the device."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import TransferFailed
from greenroom.experts.bookkeeping.ledger import Ledger, State
from greenroom.experts.copying.hardware import RealHardware
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.policies.base.array_types import NO_KEYS, Keys
from greenroom.policies.base.events import Reason, Tier, Transfer, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Prefetch, Target
from greenroom.policies.replacement.lru import Lru
from tests.contract.experts.engines import EXPERTS, LAYERS, MANIFEST, POLICIES, SIZE, run_layer
from tests.examples import examples
from tests.unit.experts.fakes import DEADLINE_S, FakeStore, GatedReads


class Wanting(Lru):
    """LRU that wants what the test says, and notes what comes and goes. ``refuses``: nothing leaves for host wants."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.heard: list[Transfer] = []
        self.evicted: list[tuple[Tier, int]] = []
        self.asked: list[VictimRequest] = []
        self.refuses = False

    def want(self, priorities: dict[int, float], tier: Tier = Tier.HOST, *, may_evict: bool = True) -> None:
        priority = np.zeros(self.catalogue.size, dtype=np.float32)
        for key, value in priorities.items():
            priority[key] = value
        generation = 0 if self.prefetch is None else self.prefetch.generation + 1
        allowed = np.full(self.catalogue.size, may_evict)
        self.prefetch = Prefetch(generation, priority, may_evict=allowed, tier=tier)

    def aim(self, keys: Sequence[int], tier: Tier = Tier.HOST, *, drop_others: bool = False) -> None:
        wanted = np.zeros(self.catalogue.size, dtype=np.bool_)
        wanted[list(keys)] = True
        generation = 0 if self.target is None else self.target.generation + 1
        self.target = Target(generation, wanted, tier=tier, drop_others=drop_others)

    def victims(self, request: VictimRequest) -> Keys:
        self.asked.append(request)
        if self.refuses and request.tier is Tier.HOST and request.reason is not Reason.ON_DEMAND:
            return NO_KEYS
        return super().victims(request)

    def on_transfer_done(self, transfer: Transfer) -> None:
        super().on_transfer_done(transfer)
        self.heard.append(transfer)

    def on_transfer_failed(self, transfer: Transfer) -> None:
        self.heard.append(transfer)

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        self.evicted.extend((tier, key) for key in experts.tolist())


class Bench:
    def __init__(self, device_slots: int, host_slots: int, *held: int, queue_ahead: int = 4) -> None:
        self.reads = GatedReads(*held)
        self.store = FakeStore(MANIFEST, self.reads)
        catalogue = catalogue_of(MANIFEST)
        self.policy = Wanting(catalogue)
        config = EngineConfig(
            device_slots=device_slots, host_slots=host_slots, queue_ahead=queue_ahead, transfer_timeout_s=DEADLINE_S
        )
        self.engine = ExpertEngine(self.store, catalogue, self.policy, config)

    @property
    def host(self) -> Ledger:
        assert self.engine.host is not None
        return self.engine.host

    @property
    def on_host(self) -> list[int]:
        return [int(key) for key in np.flatnonzero(self.host.resident)]

    def layer(self, layer: int, *experts: int, let: int | None = None) -> None:
        """``let``: a read that is held up until the layer's own fetches are queued."""
        row, engine = np.zeros(1, dtype=np.int64), self.engine
        with engine.step(row, row == 1):
            engine.layer_entered(layer)
            with engine.routed(layer, np.array([experts])) as landing:
                if let is not None:
                    self.reads.let(let)
                seen = []
                for expert, (weights,) in landing:
                    engine.audit()
                    assert (weights == 100 * layer + expert).all()
                    seen.append(expert)
        assert sorted(seen) == sorted(experts)
        engine.audit(idle=True)

    def settle(self) -> None:
        """Let everything land, and all that is wanted follow."""
        engine = self.engine
        engine._prefetcher.pump()
        while engine._tiers.moving or engine._tiers.moving_to_host:
            assert engine._tiers.wait(DEADLINE_S)
            engine._on_demand.deliver()
            engine.audit()
            engine._prefetcher.pump()


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.reads.let(*range(SIZE))
        bench.engine.close()


def bench_of(benches: list[Bench], device_slots: int, host_slots: int, *held: int, queue_ahead: int = 4) -> Bench:
    benches.append(Bench(device_slots, host_slots, *held, queue_ahead=queue_ahead))
    return benches[-1]


@pytest.mark.parametrize("as_target", [False, True])
def test_what_is_wanted_on_the_host_is_read_once_and_is_a_copy_away(benches: list[Bench], as_target: bool) -> None:
    bench = bench_of(benches, 4, 6)
    if as_target:
        bench.policy.aim([7, 9])
    else:
        bench.policy.want({9: 1.0, 7: 2.0})
    bench.settle()
    assert bench.on_host == [7, 9]
    assert not bench.engine.device.resident.any()
    assert sorted((t.expert, t.target) for t in bench.policy.heard) == [(7, Tier.HOST), (9, Tier.HOST)]
    bench.layer(1, 1, 3)
    counters = bench.engine.refresh_counters()
    assert bench.reads.begun == [7, 9]
    assert (counters.host_prefetches, counters.host_prefetches_used, counters.host_prefetches_wasted) == (2, 2, 0)
    assert (counters.prefetches, counters.on_demand_fetches, counters.hits) == (0, 2, 0)
    assert counters.bytes_by_link["disk"] == counters.bytes_by_link["host-device"] == 2 * 4096


def test_wants_for_a_host_tier_that_is_not_there_are_left_alone(benches: list[Bench]) -> None:
    bench = bench_of(benches, 4, 0)
    bench.policy.want({7: 1.0})
    bench.policy.aim([9])
    bench.settle()
    bench.layer(0, 0, 1)
    assert sorted(bench.reads.begun) == [0, 1]
    assert bench.engine.counters.host_prefetches == 0


def test_on_demand_before_device_prefetch_before_host_prefetch(benches: list[Bench]) -> None:
    bench = bench_of(benches, 8, 12, 6)
    bench.policy.want({6: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(6)
    bench.policy.aim([7, 8])  # queued first, and wanted least
    bench.engine._prefetcher.pump()
    bench.policy.want({12: 9.0, 13: 5.0}, Tier.DEVICE)
    with bench.engine.step(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_)):
        bench.engine._prefetcher.pump()
        with bench.engine.routed(0, np.array([[0, 1]])) as landing:
            bench.reads.let(6)
            assert sorted(expert for expert, _ in landing) == [0, 1]
    bench.settle()
    assert bench.reads.begun == [6, 0, 1, 12, 13, 7, 8]


@pytest.mark.parametrize("begun", [False, True])
def test_a_layer_takes_over_what_is_on_its_way_to_the_host(benches: list[Bench], begun: bool) -> None:
    held = 7 if begun else 9
    bench = bench_of(benches, 4, 6, held)
    bench.policy.want({9: 5.0, 7: 1.0} if not begun else {7: 5.0, 9: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(held)
    bench.layer(1, 1, 5, let=held)  # keys 7 and 11
    bench.settle()
    assert sorted(bench.reads.begun) == [7, 9, 11], "one read each"
    counters = bench.engine.counters
    assert (counters.host_prefetches, counters.host_prefetches_used) == (2, 1)
    assert counters.on_demand_fetches == 2
    assert 9 in bench.on_host


def test_a_want_for_the_device_takes_over_one_for_the_host(benches: list[Bench]) -> None:
    bench = bench_of(benches, 4, 6, 9)
    bench.policy.aim([9, 11])
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(9)
    bench.policy.want({9: 1.0, 11: 2.0}, Tier.DEVICE)
    bench.engine._prefetcher.pump()
    assert bench.engine.device.state[[9, 11]].tolist() == [State.LOADING] * 2
    assert bench.engine._tiers.moving_to_host == 0
    bench.engine.audit()
    bench.reads.let(9)
    bench.settle()
    assert bench.engine.device.resident[[9, 11]].all()
    assert sorted(bench.reads.begun) == [9, 11]
    counters = bench.engine.counters
    assert (counters.prefetches, counters.host_prefetches, counters.host_prefetches_used) == (2, 2, 2)


def test_what_waits_follows_the_newest_wants_and_is_taken_back_with_them(benches: list[Bench]) -> None:
    bench = bench_of(benches, 4, 8, 0, queue_ahead=5)
    bench.policy.want({0: 9.0, 7: 3.0, 8: 2.0, 9: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(0)
    bench.policy.want({9: 5.0, 7: 1.0})
    bench.engine._prefetcher.pump()
    assert bench.host.state[8] == State.ABSENT
    assert bench.engine.counters.host_prefetches == 3
    bench.policy.aim([10, 11])
    bench.engine._prefetcher.pump()
    bench.policy.aim([11])
    bench.engine._prefetcher.pump()
    assert bench.host.state[[10, 11]].tolist() == [State.ABSENT, State.LOADING]
    bench.engine.audit()
    bench.reads.let(0)
    bench.settle()
    assert bench.reads.begun == [0, 9, 7, 11]
    assert bench.engine.counters.host_prefetches == 4


@pytest.mark.parametrize("wanted", ["elsewhere", "not at all"])
def test_a_want_that_moves_to_another_tier_or_ends_is_taken_back(benches: list[Bench], wanted: str) -> None:
    bench = bench_of(benches, 4, 8, 0)
    bench.policy.want({0: 9.0, 7: 3.0}, Tier.DEVICE)
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(0)
    assert bench.engine.device.state[7] == State.LOADING
    if wanted == "elsewhere":
        bench.policy.want({7: 3.0}, Tier.HOST)
    else:
        bench.policy.prefetch = None
    bench.engine._prefetcher.pump()
    assert bench.engine.device.state[7] == State.ABSENT
    bench.engine.audit()
    bench.reads.let(0)
    bench.settle()
    assert bench.reads.begun == ([0, 7] if wanted == "elsewhere" else [0])
    assert not bench.engine.device.resident[7]
    assert bench.engine.counters.prefetches == 1


def test_no_more_than_so_many_are_on_their_way_and_those_to_the_device_are_counted_apart(
    benches: list[Bench],
) -> None:
    bench = bench_of(benches, 8, 12, 0, 1, 2, queue_ahead=2)
    bench.policy.aim(range(6))
    bench.engine._prefetcher.pump()
    assert bench.engine._tiers.moving_to_host == 2
    bench.policy.want({12: 1.0, 13: 2.0}, Tier.DEVICE)
    bench.engine._prefetcher.pump()
    assert bench.engine._tiers.moving == 2, "those that stay on the host take no place of theirs"
    assert bench.engine._tiers.moving_to_host == 2

    other = bench_of(benches, 8, 12, 12, queue_ahead=2)
    other.policy.want({12: 4.0, 13: 3.0, 14: 2.0, 15: 1.0}, Tier.DEVICE)
    other.engine._prefetcher.pump()
    other.reads.wait_begun(12)
    other.engine._prefetcher.pump()
    other.policy.aim(range(6))
    other.engine._prefetcher.pump()
    assert other.engine._tiers.waiting_prefetches == other.engine._tiers.moving_to_host == 2


def test_room_on_the_host_is_made_by_the_policys_victims(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 3)
    bench.policy.aim([0, 1, 2])
    bench.settle()
    bench.policy.want({7: 1.0, 8: 2.0}, may_evict=True)
    bench.policy.target = None
    bench.policy._recency.use(np.array([0]))
    bench.settle()
    request = bench.policy.asked[0]
    assert (request.tier, request.reason, request.incoming.tolist()) == (Tier.HOST, Reason.PREFETCH, [8])
    assert sorted(bench.policy.evicted) == [(Tier.HOST, 1), (Tier.HOST, 2)]
    assert bench.on_host == [0, 7, 8]
    assert bench.engine.counters.host_prefetches_wasted == 2
    assert bench.engine.counters.evictions == 0, "none left the device"


@pytest.mark.parametrize("for_device", [False, True])
def test_experts_that_are_on_the_device_as_well_leave_the_host_first(benches: list[Bench], for_device: bool) -> None:
    bench = bench_of(benches, 3, 3)
    bench.layer(0, 0, 1)
    bench.policy.want({7: 1.0})
    bench.settle()
    bench.policy._recency.use(np.array([0, 1]))  # 7 is the one that LRU would let go
    bench.policy.want({8: 1.0}, Tier.DEVICE if for_device else Tier.HOST)
    bench.settle()
    assert bench.policy.evicted == [(Tier.HOST, 0)]
    assert bench.on_host == [1, 7, 8]
    assert bench.engine.device.resident[8] == for_device


def test_without_leave_to_evict_only_free_host_slots_are_filled(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 3)
    bench.policy.want({0: 1.0, 1: 1.0})
    bench.settle()
    bench.policy.want({7: 1.0, 8: 2.0}, may_evict=False)
    bench.settle()
    assert bench.on_host == [0, 1, 8]
    assert bench.policy.asked == []


def test_a_refusal_of_host_room_holds_until_others_may_leave(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 2)
    bench.policy.aim([0, 1])
    bench.settle()
    bench.policy.refuses = True
    bench.policy.aim([6, 7])
    for _ in range(3):
        bench.engine._prefetcher.pump()
    assert len(bench.policy.asked) == 1
    bench.policy.refuses = False
    bench.engine._prefetcher.pump()
    assert bench.on_host == [0, 1]
    bench.engine._prefetcher.pump(freed=True)
    bench.settle()
    assert bench.on_host == [6, 7]


def test_a_target_displaces_only_others_and_drops_them_where_it_says_so(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 3)
    bench.policy.aim([0, 1, 2])
    bench.settle()
    bench.policy.aim([1, 2, 9, 10])
    bench.settle()
    assert bench.on_host == [1, 2, 9], "more members than fit: the first that do"
    bench.policy.aim([2], drop_others=True)
    bench.settle()
    assert bench.on_host == [2]
    assert not bench.engine.device.resident.any()


def test_a_member_that_is_on_the_device_is_not_read_and_its_copy_makes_room(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 3)
    bench.layer(0, 0, 1)  # both are on the device and on the host now
    assert bench.on_host == [0, 1]
    bench.policy.aim([0, 1, 2, 3])
    bench.settle()
    assert {2, 3} <= set(bench.on_host)
    assert sorted(bench.reads.begun) == [0, 1, 2, 3]
    bench.engine.audit(idle=True)


def test_what_is_bound_for_the_device_takes_the_host_slots_of_what_waits(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 2, 6)
    bench.policy.want({6: 9.0, 7: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(6)
    assert bench.host.free == 0
    bench.layer(0, 0, 1, let=6)
    assert bench.reads.begun[:3] == [6, 0, 1], "7 was taken back"
    assert not bench.engine.device.resident[[6, 7]].any()
    assert all(tier is Tier.HOST for tier, _ in bench.policy.evicted)


def test_room_that_comes_free_on_the_host_is_for_what_is_bound_for_the_device(benches: list[Bench]) -> None:
    bench = bench_of(benches, 4, 2, 6)
    bench.policy.aim([6, 7])
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(6)
    bench.policy.want({12: 2.0, 13: 1.0}, Tier.DEVICE)
    bench.engine._prefetcher.pump()
    assert bench.engine._tiers.short_of_host_room, "12 has taken the place of 7, 13 has none"
    bench.policy.want({13: 1.0}, Tier.DEVICE)
    bench.engine._prefetcher.pump()
    assert bench.host.state[[7, 12]].tolist() == [State.ABSENT] * 2
    bench.engine._on_demand.deliver()
    assert bench.host.state[13] == State.LOADING
    assert not bench.engine._tiers.short_of_host_room
    bench.engine.audit()


def test_a_read_for_the_host_that_fails_does_not_fail_the_layer_that_will_ask_for_it(benches: list[Bench]) -> None:
    """Two of the layer's four experts have no slot yet when the read of one of these fails."""
    bench = bench_of(benches, 2, 4, 3)
    bench.policy.want({3: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(3)
    bench.policy.prefetch = None
    bench.reads.failures[3] = 2
    bench.layer(0, 0, 1, 2, 3, let=3)
    assert bench.reads.begun == [3, 3, 0, 1, 2, 3]
    assert bench.engine.counters.failed_transfers == 1


def test_a_read_for_the_host_that_fails_fails_no_layer(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 4)
    bench.reads.failures[7] = 2
    bench.policy.want({7: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(7)
    bench.policy.prefetch = None
    bench.settle()
    assert bench.engine.counters.failed_transfers == 1
    (failed,) = bench.policy.heard
    assert (failed.expert, failed.target, failed.error is None) == (7, Tier.HOST, False)
    assert bench.host.free == 4
    bench.layer(1, 1, 2)
    assert bench.engine.counters.failed_transfers == 1


def test_a_layer_that_took_over_a_read_that_fails_is_told(benches: list[Bench]) -> None:
    bench = bench_of(benches, 2, 4, 7)
    bench.reads.failures[7] = 2
    bench.policy.want({7: 1.0})
    bench.engine._prefetcher.pump()
    bench.reads.wait_begun(7)
    bench.policy.prefetch = None
    with pytest.raises(TransferFailed, match="expert 1 of MoE layer 1"):
        bench.layer(1, 1, 2, let=7)
    assert bench.reads.begun.count(7) == 2, "one read, tried once more"
    bench.settle()
    bench.engine.audit(idle=True)
    bench.layer(1, 1, 2)


@pytest.mark.parametrize("host_slots", [3, 12])
def test_the_restless_policy_does_reach_the_host(host_slots: int) -> None:
    """Guards the suite: the schedules that test_engine plays with it try what is here."""
    catalogue = catalogue_of(MANIFEST)
    engine = ExpertEngine(
        FakeStore(MANIFEST),
        catalogue,
        POLICIES["restless-host"](catalogue),
        EngineConfig(device_slots=4, host_slots=host_slots, transfer_timeout_s=DEADLINE_S),
    )
    row = np.zeros(1, dtype=np.int64)
    try:
        for turn in range(60):
            with engine.step(row, row == 1):
                for layer in range(LAYERS):
                    run_layer(engine, layer, np.array([[turn % EXPERTS, (turn + 1 + layer) % EXPERTS]]))
                    while engine._tiers.moving or engine._tiers.moving_to_host:
                        assert engine._tiers.wait(DEADLINE_S)
                        engine._on_demand.deliver()
        counters = engine.counters
        assert counters.prefetches > 20
        assert counters.host_prefetches > 20
        assert counters.host_prefetches_used > 0
        assert counters.host_prefetches_wasted > 0
    finally:
        engine.close()


class Counting(FakeStore):
    """Reads that are late and fail at random; notes an expert that is read twice at once."""

    def __init__(self, seed: int) -> None:
        super().__init__(MANIFEST, self._trouble)
        self.twice = False
        self._noise = random.Random(seed)
        self._reading: Counter[tuple[int, int]] = Counter()
        self._pause = threading.Event()

    def _trouble(self, layer: int, expert: int) -> None:
        self._pause.wait(self._noise.random() * 0.001)
        if self._noise.random() < 0.2:
            raise OSError(5, "injected")

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        with self._lock:
            self._reading[layer, expert] += 1
            self.twice |= self._reading[layer, expert] > 1
        try:
            super().read_part(layer, expert, start, buffer)
        finally:
            with self._lock:
                self._reading[layer, expert] -= 1


moves = st.tuples(
    st.sampled_from(["want host", "want device", "aim host", "aim device", "nothing", "layer", "pump", "collect"]),
    st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=4),
)


@given(
    moves=st.lists(moves, min_size=1, max_size=25),
    device_slots=st.integers(2, 8),
    host_slots=st.integers(1, 9),
    threads=st.integers(1, 3),
    seed=st.integers(0, 999),
)
@settings(max_examples=examples(60), deadline=None)
def test_any_wants_under_random_delays_and_failures(
    moves: list[tuple[str, list[int]]], device_slots: int, host_slots: int, threads: int, seed: int
) -> None:
    """Wants change while their reads are queued, begun, landed or failed; the books are right after each change."""
    catalogue = catalogue_of(MANIFEST)
    policy = Wanting(catalogue)
    store = Counting(seed)
    engine = ExpertEngine(
        store,
        catalogue,
        policy,
        EngineConfig(device_slots=device_slots, host_slots=host_slots, transfer_timeout_s=DEADLINE_S),
        hardware=RealHardware(ReadSettings(threads=threads, depth=threads)),
    )
    host = engine.host
    assert host is not None
    row = np.zeros(1, dtype=np.int64)
    failures: list[str] = []
    try:
        for word, keys in moves:
            tier = Tier.HOST if word.endswith("host") else Tier.DEVICE
            if word.startswith("want"):
                policy.want({key: 1.0 + place for place, key in enumerate(keys)}, tier, may_evict=keys[0] % 2 == 0)
            elif word.startswith("aim"):
                policy.aim(keys, tier, drop_others=keys[0] % 3 == 0)
            elif word == "nothing":
                policy.prefetch = policy.target = None
            elif word == "collect":
                engine._on_demand.deliver()
            elif word == "pump":
                engine._prefetcher.pump()
            else:
                layer, expert = divmod(keys[0], EXPERTS)
                try:
                    with engine.step(row, row == 1):
                        run_layer(engine, layer, np.array([[expert, (expert + 1) % EXPERTS]]))
                except TransferFailed as error:
                    failures.append(str(error))
                engine.audit(idle=True)
            engine.audit()
            assert engine._tiers.moving_to_host <= 4
        policy.prefetch = policy.target = None
        engine._prefetcher.pump()
        while engine._tiers.moving or engine._tiers.moving_to_host:
            assert engine._tiers.wait(DEADLINE_S)
            engine._on_demand.deliver()
            engine.audit()
        assert all("injected" in failure for failure in failures), "no layer waits until its deadline"
        assert host.loading == engine.device.loading == host.pinned == 0
        assert not store.twice, "an expert was read by two jobs at once"
        counters = engine.counters
        assert counters.host_prefetches_used + counters.host_prefetches_wasted <= counters.host_prefetches
        assert not (host.prefetches.unused & ~host.resident).any()
        assert not (engine.device.prefetches.unused & ~engine.device.resident).any()
        left = int(np.count_nonzero(host.prefetches.unused))
        failed = counters.host_prefetches - counters.host_prefetches_used - counters.host_prefetches_wasted - left
        assert 0 <= failed <= counters.failed_transfers
    finally:
        engine.close()
