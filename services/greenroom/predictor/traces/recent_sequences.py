"""The last sequences of several kinds or models, within a number and a budget of bytes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What is kept of a sequence; arrays are. ``shape[1:]`` is that of its model."""

    @property
    def nbytes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Sized)


@dataclass(slots=True, eq=False)
class Ring(Generic[K, T]):
    """The last sequences under each key: at most ``max_sequences`` under one and ``max_bytes`` over all. Beyond the
    bytes the oldest goes under the key that has most."""

    max_bytes: int
    max_sequences: int
    nbytes: int = 0
    _kept: dict[K, deque[T]] = field(default_factory=dict)
    _bytes: dict[K, int] = field(default_factory=dict)
    _full: set[K] = field(default_factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def __iter__(self) -> Iterator[K]:
        return iter(self._kept)

    def count(self, key: K) -> int:
        return len(self._kept.get(key, ()))

    def add(self, key: K, sample: T) -> bool:
        """False where it is of another shape than those under its key, which then stay, or has no room at all."""
        kept = self._kept.get(key)
        if (kept and kept[0].shape[1:] != sample.shape[1:]) or sample.nbytes > self.max_bytes:
            return False
        if kept is None:
            kept = self._kept[key] = deque()
            self._bytes[key] = 0
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
        """Whether the bytes had no room for more under it than are kept, since room came back the last time."""
        return key in self._full

    def sequences(self, key: K) -> list[T]:
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
