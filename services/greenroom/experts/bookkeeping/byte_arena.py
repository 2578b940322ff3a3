"""Places for records of any size in one region of bytes.

A record is cut at its tensors into pieces, each of which lies anywhere. So a hole is of use for some piece of almost
any record, and records of one architecture fit each other's holes exactly. Only where no hole holds a piece is
something moved. Knows nothing of memory or threads; used only by the thread that owns the engine.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from greenroom.experts.bookkeeping.ledger import LedgerError

_WINDOWS: int = 8
"""So many places are tried for a hole before all that may move is pushed together."""


class Move(NamedTuple):
    """``nbytes`` are to be copied within the region, in the order of the moves. The places may overlap."""

    owner: int
    piece: int
    source: int
    target: int
    nbytes: int


class _Piece(NamedTuple):
    """Or a hole, which has no owner."""

    owner: int | None
    number: int
    start: int
    nbytes: int


class ByteArena:
    """Which owner's pieces lie where in ``nbytes``.

    Invariants, checked by ``audit``: pieces and holes together are the region, none overlaps another, and two holes
    never touch. Any records that together have no more than ``free`` bytes find room, if everything may move.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = nbytes
        self.moved_bytes = 0
        """Of all moves so far."""
        self._pieces: dict[int, list[_Piece]] = {}  # by owner, in the order of its record
        self._holes: list[tuple[int, int]] = [(nbytes, 0)] if nbytes else []  # ascending (bytes, start)
        self._start: dict[int, int] = {0: nbytes} if nbytes else {}  # holes: by their start their bytes,
        self._end: dict[int, int] = {nbytes: 0} if nbytes else {}  # by their end their start

    @property
    def owners(self) -> Collection[int]:
        return self._pieces.keys()

    @property
    def largest_hole(self) -> int:
        return self._holes[-1][0] if self._holes else 0

    def places(self, owner: int) -> tuple[int, ...]:
        """Where each of its pieces begins."""
        return tuple(piece.start for piece in self._pieces[owner])

    def take(
        self, owner: int, pieces: Sequence[int], movable: Collection[int] = (), most: int | None = None
    ) -> list[Move] | None:
        """Give ``owner`` room for pieces of these bytes, after these moves, which are to be carried out at once.

        ``movable``: owners whose pieces may be moved for it, of ``most`` bytes in sum (None: any). None: it does not
        fit so, and nothing was changed. Each piece has the smallest hole that holds it, the largest piece first.
        Raises LedgerError if it has room already.
        """
        if owner in self._pieces:
            raise LedgerError(f"{owner} has room already")
        if sum(pieces) > self.free:
            return None
        bring_back = None if most is None else self.as_it_is()
        moves = self._place(owner, pieces, movable)
        if moves is None:
            # Pieces placed one after the other may have parted what is free. One hole for all of them is never parted.
            moves = self._push_together(sum(pieces), movable)
            if moves is None:
                return None
            self._place(owner, pieces, ())
        moved = sum(move.nbytes for move in moves)
        if bring_back is not None and moved > most:  # type: ignore[operator]
            bring_back()
            return None
        self.moved_bytes += moved
        return moves

    def give_back(self, owner: int) -> None:
        """Raises LedgerError if it has no room."""
        pieces = self._pieces.pop(owner, None)
        if pieces is None:
            raise LedgerError(f"{owner} has no room to give back")
        for piece in pieces:
            self._give(piece.start, piece.nbytes)

    def as_it_is(self) -> Callable[[], None]:
        """What brings back everything as it is now: moves are undone here, not in memory."""
        pieces = {owner: list(own) for owner, own in self._pieces.items()}
        holes, start, end = list(self._holes), dict(self._start), dict(self._end)
        free, moved_bytes = self.free, self.moved_bytes

        def bring_back() -> None:
            self._pieces, self._holes, self._start, self._end = pieces, holes, start, end
            self.free, self.moved_bytes = free, moved_bytes

        return bring_back

    def audit(self) -> None:
        """Raises LedgerError where an invariant does not hold."""
        at, after_hole, free = 0, False, 0
        for region in self._in_order():
            hole = region.owner is None
            if region.start != at or region.nbytes < 1:
                raise LedgerError(f"something is lost, or held twice, at {min(at, region.start)}")
            if hole and after_hole:
                raise LedgerError(f"two holes touch at {at}")
            at, after_hole, free = at + region.nbytes, hole, free + region.nbytes * hole
        if at != self.nbytes or free != self.free:
            raise LedgerError(f"{at} of {self.nbytes} bytes are known of, {free} of {self.free} are free")
        if self._holes != sorted((nbytes, start) for start, nbytes in self._start.items()):
            raise LedgerError("holes are listed wrongly")
        if self._end != {start + nbytes: start for start, nbytes in self._start.items()}:
            raise LedgerError("holes' ends are listed wrongly")

    def _place(self, owner: int, pieces: Sequence[int], movable: Collection[int]) -> list[Move] | None:
        """The largest piece first. None, and nothing changed: one finds no place."""
        moves: list[Move] = []
        bring_back: Callable[[], None] | None = None
        placed: list[_Piece] = []
        self._pieces[owner] = placed  # so that it is not taken for a hole while others are moved
        for number in sorted(range(len(pieces)), key=lambda one: -pieces[one]):
            size = pieces[number]
            start = self._fit(size)
            if start is None:
                bring_back = bring_back or self.as_it_is()
                made = self._make_hole(size, movable)
                start = self._fit(size)
                if made is None or start is None:
                    bring_back()
                    self.give_back(owner)
                    return None
                moves += made
            self._occupy(start, size)
            placed.append(_Piece(owner, number, start, size))
        placed.sort(key=lambda piece: piece.number)
        return moves

    # -- holes ---------------------------------------------------------------------------------------------------------

    def _fit(self, nbytes: int) -> int | None:
        """The start of the smallest hole that holds so much."""
        at = bisect.bisect_left(self._holes, (nbytes, -1))
        return self._holes[at][1] if at < len(self._holes) else None

    def _occupy(self, start: int, nbytes: int) -> None:
        """Take the beginning of the hole at ``start``."""
        hole = self._remove(start)
        if hole > nbytes:
            self._add(start + nbytes, hole - nbytes)
        self.free -= nbytes

    def _give(self, start: int, nbytes: int) -> None:
        self.free += nbytes
        before = self._end.get(start)
        if before is not None:
            nbytes += self._remove(before)
            start = before
        if start + nbytes in self._start:
            nbytes += self._remove(start + nbytes)
        self._add(start, nbytes)

    def _add(self, start: int, nbytes: int) -> None:
        self._start[start] = nbytes
        self._end[start + nbytes] = start
        bisect.insort(self._holes, (nbytes, start))

    def _remove(self, start: int) -> int:
        nbytes = self._start.pop(start)
        del self._end[start + nbytes]
        del self._holes[bisect.bisect_left(self._holes, (nbytes, start))]
        return nbytes

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _make_hole(self, nbytes: int, movable: Collection[int]) -> list[Move] | None:
        """Move few bytes so that there is a hole of ``nbytes``. None, and nothing changed: there can be none."""
        for _, first, last in itertools.islice(sorted(self._windows(nbytes, movable)), _WINDOWS):
            moves = self._empty(first, last, movable)
            if moves is not None:
                return moves
        return self._push_together(nbytes, movable)

    def _windows(self, nbytes: int, movable: Collection[int]) -> Iterator[tuple[int, int, int]]:
        """(bytes to move, start, end) of runs of holes and movable pieces with ``nbytes``, none longer than need be."""
        run: deque[_Piece] = deque()
        length = to_move = 0
        for region in self._in_order():
            if region.owner is not None and region.owner not in movable:
                run.clear()
                length = to_move = 0
                continue
            run.append(region)
            length += region.nbytes
            to_move += region.nbytes * (region.owner is not None)
            while length - run[0].nbytes >= nbytes:
                gone = run.popleft()
                length -= gone.nbytes
                to_move -= gone.nbytes * (gone.owner is not None)
            if length >= nbytes:
                yield to_move, run[0].start, region.start + region.nbytes

    def _empty(self, first: int, last: int, movable: Collection[int]) -> list[Move] | None:
        """Move the pieces in ``[first, last)`` to holes elsewhere. None, and nothing changed: they do not fit there."""
        inside = [
            piece for own in self._pieces.values() for piece in own if first <= piece.start < last
        ]  # all of them of movable owners
        blocked = [(start, size) for start, size in self._start.items() if first <= start < last]
        for start, size in blocked:
            self._remove(start)
            self.free -= size
        moves: list[Move] = []
        for piece in sorted(inside, key=lambda one: -one.nbytes):
            target = self._fit(piece.nbytes)
            if target is None:
                break
            self._occupy(target, piece.nbytes)
            assert piece.owner is not None
            moves.append(Move(piece.owner, piece.number, piece.start, target, piece.nbytes))
        for start, size in blocked:
            self._give(start, size)
        if len(moves) < len(inside):
            for move in moves:
                self._give(move.target, move.nbytes)
            return None
        for move in moves:
            self._give(move.source, move.nbytes)
            self._replace(move)
        return moves

    def _push_together(self, nbytes: int, movable: Collection[int]) -> list[Move] | None:
        """Push the pieces of the run that has the least to push towards its start, until the hole behind them is large
        enough.
        """
        best: tuple[int, list[_Piece]] | None = None
        for fixed, run in itertools.groupby(
            self._in_order(), key=lambda region: region.owner is not None and region.owner not in movable
        ):
            regions = list(run)
            free = sum(region.nbytes for region in regions if region.owner is None)
            to_move = sum(region.nbytes for region in regions) - free
            if not fixed and free >= nbytes and (best is None or to_move < best[0]):
                best = to_move, regions
        if best is None:
            return None
        moves, hole = [], 0
        at = best[1][0].start
        for region in best[1]:
            if region.owner is None:
                hole += region.nbytes
                if hole >= nbytes:
                    break
            else:
                if region.start != at:
                    moves.append(Move(region.owner, region.number, region.start, at, region.nbytes))
                at += region.nbytes
        for move in moves:
            self._give(move.source, move.nbytes)
            self._occupy(move.target, move.nbytes)
            self._replace(move)
        return moves

    def _replace(self, move: Move) -> None:
        self._pieces[move.owner][move.piece] = _Piece(move.owner, move.piece, move.target, move.nbytes)

    def _in_order(self) -> list[_Piece]:
        """All pieces, and as pieces of nobody all holes, as they lie."""
        holes = (_Piece(None, 0, start, nbytes) for start, nbytes in self._start.items())
        return sorted(itertools.chain(holes, *self._pieces.values()), key=lambda region: region.start)
