"""Places for records of any size: nothing overlaps, nothing is lost, and whatever is free is of use."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.experts.bookkeeping.byte_arena import ByteArena, Move
from greenroom.experts.bookkeeping.ledger import LedgerError
from greenroom.experts.pack.layout import cut
from tests.examples import examples


class Memory:
    """A region with real bytes, so that a move in the wrong order or to the wrong place spoils a record."""

    def __init__(self, nbytes: int) -> None:
        self.arena = ByteArena(nbytes)
        self.region = bytearray(nbytes)
        self.pieces: dict[int, list[bytes]] = {}

    def take(self, owner: int, pieces: list[int], movable: set[int]) -> bool:
        moves = self.arena.take(owner, pieces, movable)
        if moves is None:
            return False
        for move in moves:
            self._carry_out(move, movable)
        random = Random(owner)
        self.pieces[owner] = [random.randbytes(size) for size in pieces]
        for start, own in zip(self.arena.places(owner), self.pieces[owner], strict=True):
            self.region[start : start + len(own)] = own
        return True

    def _carry_out(self, move: Move, movable: set[int]) -> None:
        assert move.owner in movable
        assert move.source != move.target
        self.region[move.target : move.target + move.nbytes] = bytes(
            self.region[move.source : move.source + move.nbytes]
        )

    def check(self) -> None:
        self.arena.audit()
        assert set(self.arena.owners) == set(self.pieces)
        for owner, own in self.pieces.items():
            for start, piece in zip(self.arena.places(owner), own, strict=True):
                assert self.region[start : start + len(piece)] == piece


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 100)), max_size=60))
def test_whatever_is_free_is_of_use_if_all_may_move(history: list[tuple[bool, list[int], int]]) -> None:
    memory = Memory(200)
    for owner, (leaves, pieces, chosen) in enumerate(history):
        if leaves and memory.pieces:
            gone = sorted(memory.pieces)[chosen % len(memory.pieces)]
            memory.arena.give_back(gone)
            del memory.pieces[gone]
        else:
            fits = sum(pieces) <= memory.arena.free
            assert memory.take(owner, pieces, set(memory.pieces)) == fits
        memory.check()


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 100)), max_size=60), st.integers(1, 5))
def test_what_may_not_move_stays_and_a_failure_changes_nothing(
    history: list[tuple[bool, list[int], int]], pinned: int
) -> None:
    memory = Memory(200)
    for owner, (leaves, pieces, chosen) in enumerate(history):
        if leaves and memory.pieces:
            gone = sorted(memory.pieces)[chosen % len(memory.pieces)]
            memory.arena.give_back(gone)
            del memory.pieces[gone]
            continue
        stay = {one for one in memory.pieces if one % pinned == 0}
        before = {one: memory.arena.places(one) for one in memory.pieces}
        free = memory.arena.free
        if not memory.take(owner, pieces, set(memory.pieces) - stay):
            assert {one: memory.arena.places(one) for one in memory.pieces} == before
            assert memory.arena.free == free
        assert all(memory.arena.places(one) == before[one] for one in stay)
        memory.check()


def test_a_record_of_the_same_pieces_needs_no_move() -> None:
    arena = ByteArena(300)
    for owner in range(3):
        assert arena.take(owner, [10, 50, 40]) == []
    random = Random(0)
    for owner in range(3, 200):
        arena.give_back(random.choice(sorted(arena.owners)))
        assert arena.take(owner, [10, 50, 40]) == []
    assert arena.moved_bytes == 0


def test_the_least_is_moved() -> None:
    arena = ByteArena(100)
    for owner, size in enumerate([20, 5, 20, 30, 25]):
        arena.take(owner, [size])
    arena.give_back(0)
    arena.give_back(2)
    assert arena.take(8, [40], movable={3, 4}) is None  # 40 are free, and 5 lie between them
    assert arena.take(8, [40], movable={1, 3, 4}) == [Move(1, 0, 20, 0, 5)]  # pushed together
    assert arena.places(8) == (5,)
    arena.give_back(8)
    arena.give_back(4)
    assert arena.take(9, [25, 40], movable={1, 3}) == []
    arena.give_back(9)
    arena.give_back(3)
    assert arena.take(10, [94], movable={1}) == []
    assert arena.moved_bytes == 5


def test_a_piece_in_the_way_goes_to_a_hole_elsewhere() -> None:
    arena = ByteArena(100)
    for owner, size in enumerate([20, 5, 20, 47, 8]):
        arena.take(owner, [size])
    for owner in (0, 2, 4):
        arena.give_back(owner)
    assert arena.take(9, [45], movable={1, 3}) == [Move(1, 0, 20, 92, 5)]
    assert arena.places(9) == (0,)


def test_without_a_way_nothing_is_moved() -> None:
    arena = ByteArena(100)
    for owner, size in enumerate([20, 5, 20, 55]):
        arena.take(owner, [size])
    arena.give_back(0)
    arena.give_back(2)
    assert arena.take(9, [21]) is None
    assert arena.take(9, [41], movable={1}) is None
    arena.audit()
    assert arena.free == 40
    assert arena.largest_hole == 20


def test_misuse_is_refused() -> None:
    arena = ByteArena(100)
    arena.take(1, [10])
    with pytest.raises(LedgerError):
        arena.take(1, [10])
    with pytest.raises(LedgerError):
        arena.give_back(2)


def test_an_audit_sees_a_lost_piece() -> None:
    arena = ByteArena(100)
    arena.take(1, [10])
    del arena._pieces[1]
    with pytest.raises(LedgerError):
        arena.audit()


@pytest.mark.parametrize(
    ("tensors", "least", "counts"),
    [([5, 1, 1, 9], 5, [1, 3]), ([1, 1], 5, [2]), ([], 5, []), ([5, 5, 1], 5, [1, 2]), ([4, 4, 4, 4], 5, [2, 2])],
)
def test_small_tensors_share_a_piece(tensors: list[int], least: int, counts: list[int]) -> None:
    assert cut(tensors, least) == counts
    assert sum(counts) == len(tensors)
