"""The last sequences under each key, within a number and a budget of bytes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from greenroom.predictor.traces.samples import Sample

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True, eq=False)
class RecentSequences(Generic[K]):
    """At most ``max_sequences`` under one key and ``max_bytes`` over all. Beyond the bytes, the oldest sequence goes
    of the key that has most bytes."""

    max_bytes: int
    max_sequences: int
    nbytes: int = 0
    _kept: dict[K, deque[Sample]] = field(default_factory=dict)
    _bytes: dict[K, int] = field(default_factory=dict)
    _full: set[K] = field(default_factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def count(self, key: K) -> int:
        return len(self._kept.get(key, ()))

    def fits(self, key: K, sample: Sample) -> bool:
        """Whether it has the shape of those under ``key``, and the budget has room for it at all."""
        kept = self._kept.get(key)
        return sample.nbytes <= self.max_bytes and (not kept or kept[0].shape == sample.shape)

    def add(self, key: K, sample: Sample) -> bool:
        """False where it does not fit; then nothing has changed."""
        if not self.fits(key, sample):
            return False
        kept = self._kept.setdefault(key, deque())
        self._bytes.setdefault(key, 0)
        kept.append(sample)
        self._grow(key, sample.nbytes)
        if len(kept) > self.max_sequences:
            self._drop(key)
        while self.nbytes > self.max_bytes:
            largest = max(self._kept, key=self._bytes.__getitem__)
            self._drop(largest)
            self._full.add(largest)
        return True

    def is_full(self, key: K) -> bool:
        """Whether a sequence under it had to go for lack of bytes, since a key was forgotten the last time."""
        return key in self._full

    def sequences(self, key: K) -> list[Sample]:
        """Oldest first."""
        return list(self._kept.get(key, ()))

    def forget(self, key: K) -> None:
        self._full.clear()
        for sample in self._kept.pop(key, ()):
            self.nbytes -= sample.nbytes
        self._bytes.pop(key, None)

    def _grow(self, key: K, nbytes: int) -> None:
        self.nbytes += nbytes
        self._bytes[key] += nbytes

    def _drop(self, key: K) -> None:
        kept = self._kept[key]
        self._grow(key, -kept.popleft().nbytes)
        if not kept:
            del self._kept[key], self._bytes[key]

    def audit(self) -> None:
        """Raises AssertionError where the books do not agree."""
        assert self._bytes == {key: sum(one.nbytes for one in kept) for key, kept in self._kept.items()}
        assert self.nbytes == sum(self._bytes.values()) <= self.max_bytes
        assert all(0 < len(kept) <= self.max_sequences for kept in self._kept.values())
