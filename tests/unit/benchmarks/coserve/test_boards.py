"""The paper's boards: who follows whom, how often each type comes, and in which order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.coserve.boards import (
    DETECTORS,
    ON_A_BOARD,
    TYPES,
    ZIPF,
    Task,
    definition,
    expert_names,
    memory_of,
    role_of,
    scanned,
)
from benchmarks.coserve.costs import documented


@pytest.mark.parametrize("board", TYPES)
def test_every_other_type_has_a_second_stage_on_one_of_the_detectors(board: str) -> None:
    graph = Task(board, 1, 0).graph
    assert len(graph) == TYPES[board] + DETECTORS
    followed = [graph.after(number, "any", 0.5) for number in range(TYPES[board])]
    assert sum(one is not None for one in followed) == TYPES[board] // 2
    assert set(followed) - {None} == set(range(TYPES[board], len(graph)))


def test_detectors_are_of_half_and_of_equal_size() -> None:
    roles = Counter(map(role_of, expert_names(352)))
    assert roles == {"type": 352, "half": 12, "equal": 12}


def test_types_come_by_zipfs_law_and_a_seed_says_which_are_frequent() -> None:
    shares = sorted(definition("A", 1).quantities.values(), reverse=True)
    assert shares == pytest.approx(np.arange(1, 353) ** -ZIPF / sum(np.arange(1, 353) ** -ZIPF))
    assert definition("A", 1) == definition("A", 1)
    assert definition("A", 1).quantities != definition("A", 2).quantities
    assert definition("A", 1).experts == definition("A", 2).experts


def test_a_fixed_board_has_each_type_and_is_scanned_again_and_again() -> None:
    board = scanned(definition("A", 3, fixed=True), 3)
    assert set(board) == set(expert_names(352)[:352])
    assert 0.7 * ON_A_BOARD <= len(board) <= ON_A_BOARD
    task = Task("A", 2 * len(board) + 5, 3, fixed=True)
    assert task.paths[: len(board)] == task.paths[len(board) : 2 * len(board)]
    assert [task.graph.names[path[0]] for path in task.paths[: len(board)]] == board


def test_paths_follow_the_graph_and_their_seed() -> None:
    task = Task("B", 300, 4)
    assert task.paths == Task("B", 300, 4).paths
    assert task.paths != Task("B", 300, 5).paths
    assert all(task.graph.after(first, None, None) == second for first, second in (p for p in task.paths if p[1:]))


def test_a_tenth_of_all_bytes_is_the_memory() -> None:
    board = Task("A", 1, 0).on(documented())
    assert memory_of(board) == pytest.approx(sum(board.bytes_of) / 10, abs=1)
    assert len(set(board.bytes_of)) == 2
    assert len(set(Task("A", 1, 0).on(documented(), every="resnet-101").bytes_of)) == 1
