"""Reservations that grow: what they hold, what they touch, and that rows stay what they were wherever they move."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from greenroom.moe.attention.kv_cache import KVAuditError, KVStore, SequenceKV
from greenroom.moe.attention.kv_layout import STEP_ROWS, KVLayout, LayerKV
from greenroom.moe.attention.kv_memory import KVMemory, mapped_bytes
from tests.examples import examples

CPU = torch.device("cpu")
DENSE = KVLayout((LayerKV(2, 4, 2, 4), LayerKV(1, 6, 1, 2)), torch.float32, CPU)
"""Pages of 512 rows: they move each time they grow."""
PAGED = KVLayout((LayerKV(2, 256, 1, 512), LayerKV(1, 512, 1, 256)), torch.float32, CPU)
"""Pages of 4 rows: from 17 rows on each head has its own."""
LAYOUTS = {"dense": DENSE, "paged": PAGED}
PAGE = mmap.PAGESIZE


def write(kv: SequenceKV, layout: KVLayout, count: int, value: float) -> None:
    for index, layer in enumerate(layout.layers):
        keys = torch.full((1, layer.key_heads, count, layer.key_dim), value)
        kv.write(index, keys, torch.full((1, layer.value_heads, count, layer.value_dim), -value))


def resident_bytes(memory: KVMemory) -> int:
    """What the system has given it."""
    nbytes = memory.numbers.nbytes
    pages = (ctypes.c_ubyte * (nbytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.numbers.data_ptr()), ctypes.c_size_t(nbytes), pages) == 0
    return PAGE * sum(page & 1 for page in pages)


def test_page_rows_fill_whole_pages_of_the_system_for_every_head() -> None:
    assert (DENSE.page_rows, PAGED.page_rows) == (512, 4)
    assert all(PAGED.page_rows * row % PAGE == 0 for row in PAGED.row_bytes)
    assert sum(PAGED.row_bytes) == PAGED.bytes_per_token
    bundled = KVLayout((LayerKV(2, 32, 2, 32),) * 6, torch.bfloat16, CPU)
    assert bundled.nbytes(50) == 77_824, "50 rows of 1,536 bytes, to the page"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(data=st.data())
def test_growing_takes_more_rows_and_no_more_than_the_most_does(layout: KVLayout, data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 5000))
    capacity = data.draw(st.integers(1, most))
    while capacity < most:
        grown = layout.grown(capacity, most)
        assert capacity < grown <= most
        assert layout.nbytes(capacity) <= layout.nbytes(grown) <= layout.nbytes(most)
        assert grown == most or layout.nbytes(grown) <= 1.25 * layout.nbytes(max(grown - 1, 64)) + PAGE
        capacity = grown


def test_a_sequence_grows_by_the_eighth_and_then_by_pages() -> None:
    store = KVStore(PAGED, 1 << 30)
    kv = store.reserve(4, 100)
    capacities = [kv.capacity]
    while kv.capacity < 40:
        write(kv, PAGED, kv.capacity - kv.length, 1.0)
        kv.commit(kv.capacity - kv.length)
        assert store.growth_bytes(kv) > 0
        store.grow(kv)
        capacities.append(kv.capacity)
    assert capacities == [4, 20, 24, 28, 32, 36, 40]
    assert STEP_ROWS == 16


def test_what_is_not_free_is_not_given_and_nothing_has_changed() -> None:
    store = KVStore(PAGED, 8 * PAGED.page_rows * PAGED.bytes_per_token)
    kv = store.reserve(20, 40)
    beside = store.reserve(12, 12)
    write(kv, PAGED, 20, 1.0)
    kv.commit(20)
    before = store.reserved_bytes
    with pytest.raises(ValueError, match="more bytes asked for by one of 40 rows at most, 0 free"):
        store.grow(kv)
    assert (kv.capacity, store.reserved_bytes) == (20, before)
    store.release(beside)
    store.grow(kv)
    assert kv.capacity == 24
    store.audit()
    with pytest.raises(ValueError, match="at most 3"):
        store.reserve(4, 3)


def test_where_no_memory_can_be_had_for_another_one_those_that_are_there_grow() -> None:
    store = KVStore(PAGED, 1 << 24)
    kv = store.reserve(4, 40)
    write(kv, PAGED, 4, 1.0)
    kv.commit(4)
    store.short = True
    assert not store.can_reserve(1)
    store.grow(kv)
    assert kv.capacity == 20


def test_memory_that_was_touched_serves_the_next_sequence_and_goes_when_nothing_is_left() -> None:
    store = KVStore(PAGED, 1 << 24)
    assert mapped_bytes() == 0
    first = store.reserve(4, 100)
    write(first, PAGED, 4, 1.0)
    first.commit(4)
    memory = first.memory
    store.release(first)
    assert store.reserved_bytes == 0
    assert store.touched_bytes == PAGED.nbytes(4)
    second = store.reserve(7, 90)
    assert second.memory is memory, "what was touched is touched again"
    store.release(second)
    del memory, first, second
    assert mapped_bytes() > 0
    store.give_back()
    assert (mapped_bytes(), store.touched_bytes) == (0, 0)


def test_what_is_kept_makes_way_for_reservations() -> None:
    budget = 10 * PAGED.page_rows * PAGED.bytes_per_token
    store = KVStore(PAGED, budget)
    long = store.reserve(40, 64)
    write(long, PAGED, 40, 1.0)
    long.commit(40)
    store.release(long)
    assert store.touched_bytes == budget
    small = [store.reserve(8, 64) for _ in range(3)]  # the first takes over what was kept, and its pages with it
    store.audit()
    assert store.touched_bytes <= budget
    for kv in small:
        write(kv, PAGED, 8, 2.0)
    assert sum(resident_bytes(kv.memory) for kv in small) <= budget


def test_the_audit_finds_memory_that_is_not_accounted_for() -> None:
    store = KVStore(PAGED, 1 << 20)
    kv = store.reserve(4, 40)
    store.audit()
    kv.memory.dense_bytes = 1 << 21
    with pytest.raises(KVAuditError, match="may be touched"):
        store.audit()
    kv.memory.dense_bytes = 0
    with pytest.raises(KVAuditError, match="other memory"):
        store.audit()


class Growing(RuleBasedStateMachine):
    """Against a model: the rows that each sequence was given. What the system has given is never beyond the budget."""

    layout: KVLayout

    @initialize(tokens=st.integers(8, 500))
    def start(self, tokens: int) -> None:
        self.store = KVStore(self.layout, self.layout.nbytes(tokens))
        self.expected: dict[SequenceKV, list[float]] = {}
        self.value = 0.0

    @rule(count=st.integers(1, 300), more=st.none() | st.integers(0, 90))
    def reserve(self, count: int, more: int | None) -> None:
        most = None if more is None else count + more
        fits = sum(kv.nbytes for kv in self.expected) + self.layout.nbytes(count) <= self.store.budget_bytes
        assert self.store.can_reserve(count) == fits
        if fits and (most or count) <= self.store.max_rows:
            kv = self.store.reserve(count, most)
            assert (kv.capacity, kv.most) == (count, most or count)
            self.expected[kv] = []

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), count=st.integers(1, 40), commit=st.booleans())
    def forward(self, data: Any, count: int, commit: bool) -> None:
        kv = data.draw(st.sampled_from(list(self.expected)))
        count = min(count, kv.capacity - kv.length)
        if count == 0:
            return
        self.value += 1
        write(kv, self.layout, count, self.value)
        if commit:
            kv.commit(count)
            self.expected[kv] += [self.value] * count

    @precondition(lambda self: any(kv.length == kv.capacity < kv.most for kv in self.expected))
    @rule(data=st.data())
    def grow(self, data: Any) -> None:
        kv = data.draw(st.sampled_from([kv for kv in self.expected if kv.length == kv.capacity < kv.most]))
        wanted = self.store.growth_bytes(kv)
        if wanted <= self.store.free_bytes:
            self.store.grow(kv)
            assert kv.length < kv.capacity
        else:
            with pytest.raises(ValueError, match="more bytes"):
                self.store.grow(kv)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        kv = data.draw(st.sampled_from(list(self.expected)))
        del self.expected[kv]
        self.store.release(kv)

    @rule()
    def give_back(self) -> None:
        self.store.give_back()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.audit()
        assert self.store.reserved_bytes == sum(kv.nbytes for kv in self.expected) <= self.store.budget_bytes
        memories = [kv.memory for kv in self.expected] + self.store._kept
        for memory in memories:
            assert resident_bytes(memory) <= memory.touched_bytes
        assert sum(map(resident_bytes, memories)) <= self.store.budget_bytes
        for kv, values in self.expected.items():
            for index in range(kv.layers):
                keys, kept = kv.read(index, 0, kv.length)
                assert keys[0, 0, :, 0].tolist() == keys[0, -1, :, -1].tolist() == values
                assert kept[0, 0, :, -1].tolist() == [-value for value in values]
                if values:
                    assert (keys.data_ptr(), kept.data_ptr()) == tuple(kv.addresses[index].tolist())
                assert keys.stride(1) == kv.stride * keys.shape[3]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for kv in list(self.expected):
                self.store.release(kv)
            self.store.give_back()
            assert (self.store.reserved_bytes, self.store.touched_bytes) == (0, 0)


class GrowingDense(Growing):
    layout = DENSE


class GrowingPaged(Growing):
    layout = PAGED


TestGrowingDense = GrowingDense.TestCase
TestGrowingPaged = GrowingPaged.TestCase
for case in (TestGrowingDense, TestGrowingPaged):
    case.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
