"""Room for records of any size without places: whatever is free is of use, as in a ByteArena where all may move."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from greenroom.experts.bookkeeping.byte_arena import Move
from greenroom.experts.bookkeeping.ledger import LedgerError


class FreeBytes:
    """As ByteArena, and nothing is ever moved. For simulations that know no more of a record than its bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = nbytes
        self._taken: dict[int, int] = {}

    @property
    def owners(self) -> Collection[int]:
        return self._taken.keys()

    def take(
        self, owner: int, pieces: Sequence[int], movable: Collection[int] = (), most: int | None = None
    ) -> list[Move] | None:
        if owner in self._taken:
            raise LedgerError(f"{owner} has room already")
        if sum(pieces) > self.free:
            return None
        self._taken[owner] = sum(pieces)
        self.free -= sum(pieces)
        return []

    def give_back(self, owner: int) -> None:
        if owner not in self._taken:
            raise LedgerError(f"{owner} has no room to give back")
        self.free += self._taken.pop(owner)

    def as_it_is(self) -> Callable[[], None]:
        taken, free = dict(self._taken), self.free

        def bring_back() -> None:
            self._taken, self.free = taken, free

        return bring_back

    def audit(self) -> None:
        if self.free < 0 or self.free + sum(self._taken.values()) != self.nbytes:
            raise LedgerError(f"{sum(self._taken.values())} bytes are taken and {self.free} free of {self.nbytes}")
