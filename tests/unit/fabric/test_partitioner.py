"""Partitions are those that Kafka's own producers choose."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2 as reference
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from greenroom.fabric.log.partitioner import murmur2, partition_of, record_bytes


@pytest.mark.parametrize(
    ("key", "signed"),
    [  # from the tests of Kafka's Java client
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_the_hash_is_that_of_the_java_client(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed % 2**32


@given(st.binary(max_size=70), st.integers(1, 50))
def test_the_hash_is_that_of_other_clients_too(key: bytes, partitions: int) -> None:
    assert murmur2(key) == reference(key)
    assert partition_of(key, partitions) == (reference(key) & 0x7FFFFFFF) % partitions


@given(
    st.none() | st.binary(max_size=300),
    st.none() | st.binary(max_size=300),
    st.lists(st.tuples(st.text(max_size=10), st.binary(max_size=10)), max_size=4),
)
def test_a_record_takes_at_most_what_is_reckoned(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]]
) -> None:
    builder = DefaultRecordBatchBuilder(2, 0, 0, 1, 1, 0, 1_000_000)
    builder.append(0, 1_700_000_000_000, key, value, headers)
    batch = builder.build()
    assert len(batch) <= record_bytes(key, value, headers) <= len(batch) + 100 + sum(4 * len(n) + 8 for n, _ in headers)
