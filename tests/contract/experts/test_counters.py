"""What an engine counts of steps with prompt rows, of the others, and between steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import TransferFailed
from greenroom.experts.bookkeeping.counters import PhaseCounters
from greenroom.experts.copying.mover import MovedBytes
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.policies.base.events import Phase
from greenroom.policies.base.expert_policy import Prefetch
from greenroom.policies.replacement.lru import Lru
from greenroom.replay.simulation.simulated_hardware import LinkProfile, SimulatedHardware
from tests.contract.experts.engines import EXPERTS, LAYERS, MANIFEST, SIZE, make_engine
from tests.examples import examples
from tests.unit.experts.fakes import FakeStore

PREFILL, DECODE, ENCODE = Phase.PREFILL, Phase.DECODE, Phase.ENCODE
NO_PICK = EXPERTS


class SimulatedEngine:
    """An engine whose disk moves an expert a second, on a clock that only waiting and ``let`` advance."""

    def __init__(self, slots: int, host_slots: int = 0) -> None:
        upload = LinkProfile(4 * PAGE_BYTES) if host_slots else None
        self.hardware = SimulatedHardware(LinkProfile(PAGE_BYTES), upload)
        catalogue = catalogue_of(MANIFEST)
        assert catalogue.bytes_of[0] == PAGE_BYTES
        config = EngineConfig(device_slots=slots, host_slots=host_slots)
        self.policy = Lru(catalogue)
        self.engine = ExpertEngine(FakeStore(MANIFEST), catalogue, self.policy, config, hardware=self.hardware)

    def step(self, phases: list[Phase], *picks: list[int], takes: float = 0.0) -> None:
        """Every row picks the same experts; ``picks`` by layer. ``takes``: seconds, after the layers."""
        with self.engine.step_of(np.arange(len(phases)), np.array(phases, dtype=np.uint8)):
            for layer, experts in enumerate(picks):
                self.engine.layer_entered(layer)
                with self.engine.routed(layer, np.array([experts] * len(phases))) as landing:
                    list(landing)
            self.let(takes)

    def let(self, seconds: float) -> None:
        self.hardware.clock.advance(seconds)

    def want(self, *keys: int) -> None:
        priority = np.zeros(SIZE, dtype=np.float32)
        priority[list(keys)] = 1
        self.policy.prefetch = Prefetch(1, priority)

    @property
    def parts(self) -> tuple[PhaseCounters, PhaseCounters, PhaseCounters]:
        counters = self.engine.refresh_counters()
        return counters.prefill, counters.decode, counters.between


def part(
    steps: int, rows: int, seconds: float, lookups: int, hits: int, stall: float, on_demand: int, prefetched: int = 0
) -> PhaseCounters:
    """``on_demand`` and ``prefetched``: experts that moved. All misses were fetched."""
    moved = {"disk": MovedBytes(on_demand * PAGE_BYTES, prefetched * PAGE_BYTES)}
    return PhaseCounters(steps, rows, seconds, lookups, hits, lookups - hits, stall, moved)


NOTHING = part(0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("phases", "of_prompts"),
    [
        ([PREFILL, PREFILL], True),
        ([PREFILL], True),
        ([DECODE, DECODE, PREFILL, DECODE], True),
        ([ENCODE], True),
        ([DECODE, ENCODE], True),
        ([DECODE], False),
        ([DECODE, DECODE], False),
    ],
)
def test_a_step_counts_as_a_prompts_if_any_of_its_rows_is(phases: list[Phase], of_prompts: bool) -> None:
    bench = SimulatedEngine(SIZE - 1)

    bench.step(phases, [0, 1], takes=0.5)

    counted = part(1, len(phases), 2.5, lookups=2, hits=0, stall=2, on_demand=2)
    assert bench.parts == ((counted, NOTHING, NOTHING) if of_prompts else (NOTHING, counted, NOTHING))


def test_phases_are_counted_apart_and_totals_are_their_sums() -> None:
    bench = SimulatedEngine(SIZE - 1)

    bench.step([PREFILL] * 3, [0, 1], [2, 3], takes=0.25)
    bench.step([PREFILL, DECODE], [0, 2])
    bench.step([DECODE], [0, 4])
    bench.step([DECODE, DECODE], [4, 5], [2, 3], takes=0.25)

    prefill, decode, between = bench.parts
    assert prefill == part(2, 5, 5.25, lookups=6, hits=1, stall=5, on_demand=5)
    assert decode == part(2, 3, 2.25, lookups=6, hits=4, stall=2, on_demand=2)
    assert between == NOTHING
    counters = bench.engine.counters
    assert (counters.steps, counters.lookups, counters.hits, counters.on_demand_fetches) == (4, 12, 5, 7)
    assert (counters.stall_seconds, counters.bytes_by_link) == (7, {"disk": 7 * PAGE_BYTES})


def test_what_moves_while_no_step_runs_is_of_no_phase() -> None:
    bench = SimulatedEngine(SIZE - 1)
    bench.engine.preload([0, 1, 2])
    assert bench.parts == (
        NOTHING,
        NOTHING,
        PhaseCounters(0, 0, 0, 0, 0, 0, 3, {"disk": MovedBytes(0, 3 * PAGE_BYTES)}),
    )

    bench.want(6, 7, 8, 9)
    bench.step([DECODE], [0, 1], takes=1.5)  # queued as layer 0 begins; one moves in the step, and half another
    bench.let(2.0)  # that one and one more
    assert bench.parts[1:] == (
        part(1, 1, 1.5, 2, 2, 0, on_demand=0, prefetched=1),
        PhaseCounters(0, 0, 0, 0, 0, 0, 3, {"disk": MovedBytes(0, 5 * PAGE_BYTES)}),
    )


def test_a_prefetch_is_of_the_step_in_which_it_moved_and_on_demand_once_a_layer_waits_for_it() -> None:
    bench = SimulatedEngine(SIZE - 1)
    bench.engine.preload([0, 1, 2])
    bench.want(6, 7, 8, 9)

    bench.step([DECODE], [0, 1], takes=1.5)
    bench.step([PREFILL], [0, 1], [1, 2])  # 7 has half a second to go, and 8 is behind it

    prefill, decode, _ = bench.parts
    assert decode.bytes_by_link["disk"] == MovedBytes(0, PAGE_BYTES)
    assert prefill.bytes_by_link["disk"] == MovedBytes(2 * PAGE_BYTES, 0)
    assert (prefill.lookups, prefill.hits, prefill.on_demand_fetches, prefill.stall_seconds) == (4, 2, 0, 1.5)
    assert bench.engine.counters.prefetches_used == 2


def test_both_links_of_a_host_tier_are_counted() -> None:
    bench = SimulatedEngine(2, host_slots=4)

    bench.step([PREFILL], [0, 1])
    bench.step([DECODE], [2, 3])
    bench.step([DECODE], [0, 1])  # from the host

    prefill, decode, _ = bench.parts
    both, twice = MovedBytes(2 * PAGE_BYTES, 0), MovedBytes(4 * PAGE_BYTES, 0)
    assert prefill.bytes_by_link == {"disk": both, "host-device": both}
    assert decode.bytes_by_link == {"disk": both, "host-device": twice}
    assert bench.engine.counters.bytes_by_link == {"disk": 4 * PAGE_BYTES, "host-device": 6 * PAGE_BYTES}


def test_a_step_that_fails_counts_for_its_phase_and_ends() -> None:
    engine, _ = make_engine("lru", 4, 0, broken)
    try:
        for phase in (PREFILL, DECODE):
            with pytest.raises(TransferFailed):
                run_step(engine, [phase], [[0, 1]], [[3, NO_PICK]])
            engine.audit_idle()
            assert engine.counters.running is engine.counters.between
        counters = engine.refresh_counters()
        assert [(of.steps, of.lookups, of.hits) for of in (counters.prefill, counters.decode)] == [(1, 3, 0), (1, 3, 2)]
        assert [of.on_demand_fetches for of in (counters.prefill, counters.decode)] == [3, 1]
        assert counters.failed_transfers == 2
    finally:
        engine.close()


def broken(layer: int, expert: int) -> None:
    if (layer, expert) == (1, 3):
        raise OSError(5, "broken")


@pytest.mark.parametrize("slots", [SIZE, SIZE - 1], ids=["resident model", "resident layer"])
def test_the_ways_that_fetch_nothing_count_too(slots: int) -> None:
    engine, _ = make_engine("static", slots, 0)
    picks = np.array([[0, 1], [1, 2]])
    try:
        engine.preload(range(slots))
        for phases in ([PREFILL, DECODE], [DECODE, DECODE], [DECODE, DECODE]):
            with engine.step_of(np.arange(2), np.array(phases, dtype=np.uint8)):
                for layer in range(LAYERS):
                    engine.layer_entered(layer)
                    if layer and engine.resident_addresses(layer, picks) is not None:
                        engine.layer_ran(layer, 3)
                        continue
                    with engine.routed(layer, picks) as landing:
                        list(landing)
        prefill, decode = engine.counters.prefill, engine.counters.decode
        assert (prefill.steps, prefill.lookups, prefill.hits) == (1, 3 * LAYERS, 3 * LAYERS)
        assert (decode.steps, decode.lookups, decode.hits) == (2, 6 * LAYERS, 6 * LAYERS)
    finally:
        engine.close()


steps_of = st.lists(
    st.tuples(
        st.lists(st.sampled_from([PREFILL, DECODE, DECODE, ENCODE]), min_size=1, max_size=3),
        st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=2, max_size=2), min_size=LAYERS, max_size=LAYERS),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("policy", ["lru", "restless", "restless-host"])
@given(steps=steps_of, slots=st.integers(2, SIZE), host_slots=st.integers(0, 6))
@settings(max_examples=examples(25), deadline=None)
def test_every_byte_and_look_up_is_counted_once_whoever_reads(
    policy: str, steps: list[tuple[list[Phase], list[set[int]]]], slots: int, host_slots: int
) -> None:
    """While another thread reads all the time, as a scrape does: what it sees never falls."""
    engine, _ = make_engine(policy, slots, host_slots)
    over = threading.Event()
    fell: list[tuple[int, int]] = []

    def read() -> None:
        before = 0
        while not over.is_set():
            now = sum(engine.refresh_counters().bytes_by_link.values())
            if now < before:
                fell.append((before, now))
            before = now

    reader = threading.Thread(target=read)
    reader.start()
    expected = {True: [0, 0], False: [0, 0]}
    try:
        for phases, layers in steps:
            of_prompts = any(phase is not DECODE for phase in phases)
            expected[of_prompts][0] += 1
            expected[of_prompts][1] += sum(map(len, layers))
            run_step(engine, phases, *([sorted(experts)] * len(phases) for experts in layers))
    finally:
        over.set()
        reader.join(20)
        engine.close()
    assert not reader.is_alive()
    assert not fell
    counters = engine.refresh_counters()
    assert [counters.prefill.steps, counters.prefill.lookups] == expected[True]
    assert [counters.decode.steps, counters.decode.lookups] == expected[False]
    assert counters.between.lookups == 0
    assert counters.bytes_by_link == {mover.name: mover.bytes_moved for mover in engine.movers}
    for of in counters.phases.values():
        assert of.hits + of.on_demand_fetches <= of.lookups
        assert 0 <= of.stall_seconds <= of.seconds


def run_step(engine: ExpertEngine, phases: list[Phase], *picks: list[list[int]]) -> None:
    """``picks`` by layer and row."""
    with engine.step_of(np.arange(len(phases)), np.array(phases, dtype=np.uint8)):
        for layer, of_rows in enumerate(picks):
            engine.layer_entered(layer)
            with engine.routed(layer, np.array(of_rows)) as landing:
                list(landing)


def test_a_step_whose_policy_fails_at_once_is_over_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimulatedEngine(slots=4)

    def fails(_step: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(world.engine._predictions, "step_started", fails)
    with pytest.raises(ValueError, match="a defect"):
        world.step([PREFILL], [0, 1])
    world.engine.close()
    assert world.engine.counters.running is world.engine.counters.between
    assert world.engine.counters.prefill.steps == 1
