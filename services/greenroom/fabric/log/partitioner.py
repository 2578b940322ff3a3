"""Which partition a record goes to, and how large the record is. The same for every log, so that they agree."""

from __future__ import annotations

import struct

from greenroom.fabric.log.base import Headers

_WORD = struct.Struct("<I")
_MIX = 0x5BD1E995
_MASK = 0xFFFFFFFF
_BATCH_BYTES = 61
_RECORD_BYTES = 21
_LENGTH_BYTES = 5


def murmur2(data: bytes) -> int:
    """The hash by which Kafka's own producers choose a partition, unsigned."""
    whole = len(data) & ~3
    h = 0x9747B28C ^ len(data)
    for (word,) in _WORD.iter_unpack(data[:whole]):
        k = word * _MIX & _MASK
        h = (h * _MIX & _MASK) ^ ((k ^ k >> 24) * _MIX & _MASK)
    if whole < len(data):
        h = (h ^ int.from_bytes(data[whole:], "little")) * _MIX & _MASK
    h = (h ^ h >> 13) * _MIX & _MASK
    return h ^ h >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition for the key: the same that Kafka's default partitioner chooses."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions if partitions > 1 else 0


def record_bytes(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    """The largest size of a record in bytes, sent in a batch of its own. A topic's largest message bounds this size."""
    size = _BATCH_BYTES + _RECORD_BYTES + 3 * _LENGTH_BYTES + len(key or b"") + len(value or b"")
    for name, content in headers:
        size += 2 * _LENGTH_BYTES + 4 * len(name) + len(content)
    return size
