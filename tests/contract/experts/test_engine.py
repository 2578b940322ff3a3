"""Whatever policy, budget and movers do: a layer gets each of its experts once, whole, and nothing leaks."""

from __future__ import annotations

import contextlib
import random
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greenroom.core.errors import BudgetTooSmall, TransferFailed
from greenroom.experts.bookkeeping.ledger import State
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.policies.base.array_types import Mask
from greenroom.policies.base.events import Phase, Step
from greenroom.policies.replacement.lru import Lru
from tests.contract.experts.engines import (
    EXPERTS,
    LAYERS,
    MANIFEST,
    POLICIES,
    SIZE,
    TOP_K,
    make_engine,
    routes,
    run_layer,
    run_steps,
    sizes_of_records,
)
from tests.examples import examples
from tests.unit.experts.fakes import FakeStore


@pytest.mark.parametrize("policy", POLICIES)
@given(
    steps=routes,
    device_slots=st.integers(TOP_K, LAYERS * EXPERTS),
    host_slots=st.integers(0, 8),
    pages=sizes_of_records,
)
@settings(max_examples=examples(25), deadline=None)
def test_any_schedule_under_any_budget(
    policy: str, steps: list[list[list[int]]], device_slots: int, host_slots: int, pages: list[int]
) -> None:
    engine, _ = make_engine(policy, device_slots, host_slots, pages=pages)
    try:
        run_steps(engine, steps)
        assert engine.counters.stall_seconds < 10, "a layer waited though nothing moved"
    finally:
        engine.close()


@pytest.mark.parametrize("policy", POLICIES)
@given(
    steps=routes,
    device_slots=st.integers(TOP_K, 9),
    host_slots=st.integers(0, 4),
    fills=st.booleans(),
    seed=st.integers(0, 999),
    pages=sizes_of_records,
)
@settings(max_examples=examples(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_delays_and_failures_in_the_movers(
    policy: str,
    steps: list[list[list[int]]],
    device_slots: int,
    host_slots: int,
    fills: bool,
    seed: int,
    pages: list[int],
) -> None:
    """A failed transfer fails the layer that needed it; afterwards everything is as if it had never been asked."""
    noise = random.Random(seed)
    pause = threading.Event()

    def trouble(layer: int, expert: int) -> None:
        pause.wait(noise.random() * 0.002)
        if noise.random() < 0.3:
            raise OSError(5, "injected")

    engine, _ = make_engine(policy, device_slots, host_slots, trouble, pages=pages)
    asked = completed = 0
    messages: list[str] = []
    try:
        if fills:
            engine.fill_host(range(LAYERS * EXPERTS))
        for layers in steps:
            rows = np.zeros(max(map(len, layers)), dtype=np.int64)
            with engine.step(rows, rows == 0):
                for layer, experts in enumerate(layers):
                    picks = np.array([[e, (e + 1) % EXPERTS] for e in experts], dtype=np.int64)
                    try:
                        assert sorted(run_layer(engine, layer, picks)) == np.unique(picks).tolist()
                        completed += 1
                    except TransferFailed as error:
                        messages.append(str(error))
                    engine.audit(idle=True)
                    asked += 1
        assert engine.counters.failed_transfers >= asked - completed == len(messages)
        assert all("injected" in message for message in messages), "no layer waits until its deadline"
        assert engine.counters.stall_seconds < 10
    finally:
        engine.close()


def test_all_resident_after_the_first_pass(closing: list[ExpertEngine]) -> None:
    engine, store = make_engine("lru", LAYERS * EXPERTS, 0)
    closing.append(engine)
    every = [[list(range(EXPERTS))] * LAYERS]
    run_steps(engine, every * 3)
    assert engine.counters.hits == 2 * LAYERS * EXPERTS
    assert set(store.reads.values()) == {1}, "nothing is moved twice"


def test_only_what_the_layer_needs_is_evicted_for_it(closing: list[ExpertEngine]) -> None:
    engine, store = make_engine("lru", 4, 0)
    closing.append(engine)
    run_steps(engine, [[[0], [0], [0]], [[0], [0], [0]]])  # 2 a layer, 3 layers, 4 slots: LRU always misses
    assert engine.counters.hits == 0
    assert engine.counters.evictions == 12 - 4
    assert sum(store.reads.values()) == 12


def test_the_host_tier_keeps_what_leaves_the_device(closing: list[ExpertEngine]) -> None:
    engine, store = make_engine("lru", 2, LAYERS * EXPERTS)
    closing.append(engine)
    run_steps(engine, [[[0], [2], [4]]] * 4)
    assert sum(store.reads.values()) == 6, "read from the disk once, then copied from the host"
    moved = engine.refresh_counters().bytes_by_link
    assert moved["host-device"] > moved["disk"] > 0


class Masking(Lru):
    """Would keep every row from expert 0."""

    def row_mask(self, step: Step, layer: int, resident: Mask) -> Mask | None:
        mask = np.ones((step.rows, EXPERTS), dtype=np.bool_)
        mask[:, 0] = False
        return mask


@pytest.mark.parametrize("approximate", [False, True])
def test_rows_are_kept_from_experts_only_where_approximation_was_opted_into(approximate: bool) -> None:
    catalogue = catalogue_of(MANIFEST)
    config = EngineConfig(device_slots=4, approximate=approximate)
    engine = ExpertEngine(FakeStore(MANIFEST), catalogue, Masking(catalogue), config)
    rows = np.zeros(3, dtype=np.int64)
    with engine.step(rows, rows == 0):
        mask = engine.allowed_experts(1)
    engine.close()
    if not approximate:
        assert mask is None
    else:
        assert mask is not None
        assert mask.shape == (3, EXPERTS)


def test_a_layer_that_is_abandoned_holds_nothing(closing: list[ExpertEngine]) -> None:
    engine, _ = make_engine("lru", 3, 0)
    closing.append(engine)
    rows = np.zeros(5, dtype=np.int64)
    with engine.step(rows, rows == 0):
        with contextlib.suppress(ZeroDivisionError), engine.routed(0, np.arange(EXPERTS)[:, None]) as landing:
            next(iter(landing))
            raise ZeroDivisionError
        engine.audit(idle=True)
        assert sorted(run_layer(engine, 1, np.arange(EXPERTS)[:, None])) == list(range(EXPERTS))


def test_a_link_that_hangs_is_given_up_after_the_deadline(closing: list[ExpertEngine]) -> None:
    release = threading.Event()
    catalogue = catalogue_of(MANIFEST)

    def hang(layer: int, expert: int) -> None:
        if layer == 0:
            release.wait(20)

    store = FakeStore(MANIFEST, hang)
    engine = ExpertEngine(store, catalogue, Lru(catalogue), EngineConfig(device_slots=4, transfer_timeout_s=0.05))
    closing.append(engine)
    rows = np.zeros(1, dtype=np.int64)
    with engine.step(rows, rows == 0):
        with pytest.raises(TransferFailed, match="landed for"):
            run_layer(engine, 0, np.array([[0, 1]]))
        release.set()
        run_layer(engine, 1, np.array([[0, 1]]))
    engine.audit(idle=True)


def test_preload_fills_in_order_and_remembers(closing: list[ExpertEngine]) -> None:
    engine, _ = make_engine("lfu", 5, 0)
    closing.append(engine)
    told: list[int] = []
    assert engine.preload([7, 3, 3, 11, 0, 1, 2], told.append) == 5
    assert sum(told) == 5
    assert engine.resident_keys().tolist() == [0, 1, 3, 7, 11]
    run_layer(engine, 0, np.array([[0, 3]]))
    assert engine.counters.hits == 2
    assert (engine.device.state[[0, 3]] == State.RESIDENT).all()


def test_a_failing_preload_says_which_expert() -> None:
    def broken(layer: int, expert: int) -> None:
        raise OSError(5, "Input/output error")

    engine, _ = make_engine("lru", 5, 0, broken)
    with pytest.raises(TransferFailed, match="expert 1 of MoE layer 1 could not be had: OSError"):
        engine.preload([7])
    engine.close()


def test_a_budget_below_one_layers_top_k_is_refused() -> None:
    with pytest.raises(BudgetTooSmall, match="give at least 8 KiB"):
        make_engine("lru", TOP_K - 1, 0)


def test_the_time_that_missing_experts_take_follows_the_link(closing: list[ExpertEngine]) -> None:
    engine, _ = make_engine("lru", SIZE - 4, 0)
    closing.append(engine)
    record = int(engine.catalogue.bytes_of.max())
    assert engine.missing_seconds(None) is None, "nothing has been moved, and no rate was measured before"
    assert engine.missing_seconds(float(record)) == SIZE, "a second each"

    engine.preload(range(SIZE - 4))
    disk = engine.movers[0]
    disk.busy_seconds = 3.0
    assert engine.missing_seconds(float(record)) == pytest.approx(4 * 3.0 * record / disk.bytes_moved)


def test_of_two_links_the_one_that_takes_longer_counts(closing: list[ExpertEngine]) -> None:
    engine, _ = make_engine("lru", 6, 12)
    closing.append(engine)
    engine.preload(range(6))
    disk, upload = engine.movers
    disk.busy_seconds, upload.busy_seconds = 6.0, 1.0
    assert engine.host is not None
    on_disk = int((~engine.device.resident & ~engine.host.resident).sum())
    record = disk.bytes_moved / 6
    by_disk = on_disk * 6.0 * record / disk.bytes_moved
    by_upload = (SIZE - 6) * 1.0 * record / upload.bytes_moved
    assert by_disk > by_upload
    assert engine.missing_seconds(None) == pytest.approx(by_disk)
    upload.busy_seconds = 60.0
    assert engine.missing_seconds(None) == pytest.approx(10 * 6 * by_upload)


def test_nothing_missing_takes_no_time(closing: list[ExpertEngine]) -> None:
    engine, _ = make_engine("lru", SIZE, 0)
    closing.append(engine)
    engine.preload(range(SIZE))
    assert engine.missing_seconds(None) == 0.0


def test_the_policy_hears_of_the_step_after_the_next_one_and_of_its_number() -> None:
    told: list[tuple[str, Step]] = []

    class Hears(Lru):
        def on_step_planned(self, step: Step) -> None:
            told.append(("planned", step))

        def on_step_started(self, step: Step) -> None:
            told.append(("started", step))

    catalogue = catalogue_of(MANIFEST)
    engine = ExpertEngine(FakeStore(MANIFEST), catalogue, Hears(catalogue), EngineConfig(device_slots=TOP_K))
    paths = np.full((1, SIZE), 0.25, dtype=np.float32)
    rows, later = np.array([3, 4]), np.array([5])
    try:
        engine.step_planned(later, later > 5, np.array([70]), paths)
        with engine.step(rows, rows > 3):
            pass
        with engine.step(later, later > 5):
            pass
    finally:
        engine.close()

    assert [(what, step.number, step.row_sequences.tolist()) for what, step in told] == [
        ("planned", 2, [5]),
        ("started", 1, [3, 4]),
        ("started", 2, [5]),
    ]
    planned = told[0][1]
    assert planned.row_tokens is not None
    assert (planned.row_tokens.tolist(), planned.row_phases.tolist()) == ([70], [Phase.DECODE])
    assert planned.row_paths is paths
