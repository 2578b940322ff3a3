"""Reservations, roll-back and memory of keys and values. All of it in any order: test_kv_growth."""

from __future__ import annotations

import mmap

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from greenroom.moe.attention.kv_cache import KVAuditError, KVStore, SequenceKV
from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.attention.kv_memory import mapped_bytes

CPU = torch.device("cpu")
SMALL = KVLayout((LayerKV(2, 4, 2, 4), LayerKV(1, 6, 1, 2)), torch.float32, CPU)
PAGE = mmap.PAGESIZE


def rows(layer: LayerKV, count: int, value: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.full((1, layer.key_heads, count, layer.key_dim), value),
        torch.full((1, layer.value_heads, count, layer.value_dim), value),
    )


def test_bytes_per_token_are_the_sum_over_layers_in_the_dtype() -> None:
    assert SMALL.bytes_per_token == (16 + 8) * 4
    assert KVLayout(SMALL.layers, torch.bfloat16, CPU).bytes_per_token == (16 + 8) * 2


@given(st.integers(1, 4000), st.integers(0, 1 << 20))
def test_what_fits_within_a_budget_is_exact(count: int, budget: int) -> None:
    assert (SMALL.nbytes(count) <= budget) == (count <= SMALL.rows_within(budget))
    assert SMALL.nbytes(count) % PAGE == 0
    assert SMALL.nbytes(count) >= count * SMALL.bytes_per_token


def test_views_of_layers_do_not_overlap() -> None:
    kv = SequenceKV(SMALL, 5)
    for index, layer in enumerate(SMALL.layers):
        kv.write(index, *rows(layer, 5, float(index + 1)))
    for index in range(kv.layers):
        keys, values = kv.read(index, 0, 5)
        assert bool((keys == index + 1).all())
        assert bool((values == index + 1).all())


def test_rows_of_a_failed_forward_are_written_over() -> None:
    kv = SequenceKV(SMALL, 4)
    kv.write(0, *rows(SMALL.layers[0], 2, 1.0))
    kv.commit(2)
    kv.write(0, *rows(SMALL.layers[0], 2, 2.0))  # never committed
    kv.write(0, *rows(SMALL.layers[0], 1, 3.0))
    kv.commit(1)
    assert kv.read(0, 0, kv.length)[0][0, 0, :, 0].tolist() == [1.0, 1.0, 3.0]


def test_a_sequence_can_not_outgrow_its_reservation() -> None:
    kv = SequenceKV(SMALL, 4)
    with pytest.raises(ValueError, match="5 rows do not fit into a reservation of 4"):
        kv.write(0, *rows(SMALL.layers[0], 5, 1.0))
    with pytest.raises(ValueError, match="5 more rows"):
        kv.commit(5)
    with pytest.raises(ValueError, match="layer 1 keeps"):
        kv.write(1, *rows(SMALL.layers[0], 1, 1.0))
    assert kv.length == 0


def test_a_store_refuses_without_changing_and_takes_back_once() -> None:
    store = KVStore(SMALL, 2 * PAGE)
    first = store.reserve(1)
    with pytest.raises(ValueError, match="bytes asked for"):
        store.reserve(2 * PAGE // SMALL.bytes_per_token)
    with pytest.raises(ValueError, match="reservation of 0 rows"):
        store.reserve(0)
    assert store.reserved_bytes == PAGE
    store.release(first)
    with pytest.raises(KeyError):
        store.release(first)
    store.audit()
    assert (store.reserved_bytes, store.peak_bytes, len(store)) == (0, PAGE, 0)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [("reserved_bytes", 1, "are accounted for"), ("peak_bytes", 0, "at most 0"), ("budget_bytes", 1, "of 1")],
)
def test_the_audit_finds_what_is_wrong(attribute: str, value: int, message: str) -> None:
    store = KVStore(SMALL, 8 * PAGE)
    kv = store.reserve(3)
    store.audit()
    setattr(store, attribute, value)
    with pytest.raises(KVAuditError, match=message):
        store.audit()
    kv.drop()


def test_the_audit_finds_a_length_beyond_its_reservation() -> None:
    store = KVStore(SMALL, 8 * PAGE)
    store.reserve(3).length = 4
    with pytest.raises(KVAuditError, match="4 KV rows in a reservation of 3"):
        store.audit()


def test_memory_is_only_what_was_written_and_goes_with_the_reservation() -> None:
    layer = LayerKV(2, 64, 2, 64)
    layout = KVLayout((layer,) * 4, torch.float32, CPU)
    process = psutil.Process()
    store = KVStore(layout, 1 << 30)
    assert mapped_bytes() == 0  # which also collects what earlier tests left, before anything is measured
    before = process.memory_info().rss
    kv = store.reserve(store.max_rows // 2)
    assert mapped_bytes() == kv.nbytes > 500 << 20
    untouched = process.memory_info().rss - before
    assert untouched < 8 << 20, f"{untouched >> 20} MiB for nothing written"
    count = 8192
    for index in range(4):
        kv.write(index, *rows(layer, count, 1.0))
    written = process.memory_info().rss - before
    assert written >= 0.9 * count * layout.bytes_per_token, "the measure does not see what is written"
    store.release(kv)
    assert mapped_bytes() == 0
    left = process.memory_info().rss - before
    assert left < written / 2, f"{left >> 20} of {written >> 20} MiB are still there"
