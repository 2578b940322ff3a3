"""Executors and memory tried on a virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from greenroom.coe.graph.definition_file import CoeDefinition, check
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.core.coe_profile import ArchitectureCosts
from greenroom.core.errors import BudgetTooSmall, InvalidConfig, UnknownName
from greenroom.profiling.coe.config import CoeProfileConfig
from greenroom.profiling.coe.profiler import best_count, choose_residents, replayed, serve_really, try_executors
from greenroom.profiling.coe.replayed_throughput import SCHEDULINGS, Board, drawn_paths, replay
from tests.coe_profiles import costs, trial

EXPERTS = 20
SIZE = 10_000


def graph() -> ExpertGraph:
    """Experts by Zipf's law, of which every other leads to one that they share."""
    lines = ['name = "line"', "[router]", 'parameter = "part"', "[quantities]"]
    lines += [f"e{number} = {1 / (number + 1)}" for number in range(EXPERTS - 1)]
    for number in range(EXPERTS - 1):
        lines += [f"[experts.e{number}]", 'model = "m"']
        if number % 2 == 0:
            lines += [f"[[experts.e{number}.next]]", 'expert = "shared"', 'label = "good"', "probability = 0.5"]
    return parsed([*lines, "[experts.shared]", 'model = "m"'])


def parsed(lines: list[str]) -> ExpertGraph:
    definition = msgspec.toml.decode("\n".join(lines), type=CoeDefinition)
    check(definition)
    return ExpertGraph(definition)


def board(cost: ArchitectureCosts | None = None, requests: int = 300) -> Board:
    made = graph()
    own = cost or costs(0.5, 20.0)
    return Board(made, [SIZE] * EXPERTS, [own] * EXPERTS, made.usage(), drawn_paths(made, requests, 0))


def config(**more: Any) -> CoeProfileConfig:
    return CoeProfileConfig(**{"memory_bytes": 8 * SIZE, "executors": 2, "requests": 300, **more})


def test_paths_come_as_probably_as_the_graph_says() -> None:
    made = graph()
    paths = drawn_paths(made, 20_000, 3)
    assert paths == drawn_paths(made, 20_000, 3)
    assert made.counted_usage(paths) == pytest.approx(made.usage(), abs=0.015)
    assert Counter(map(len, paths)).keys() == {1, 2}


def test_a_router_that_is_an_expert_comes_first() -> None:
    made = parsed(
        [
            'name = "line"',
            "[router]",
            'expert = "kind"',
            'first = { a = "one", b = "two" }',
            "[experts.kind]",
            'model = "m"',
            "[experts.one]",
            'model = "m"',
            "[experts.two]",
            'model = "m"',
        ]
    )
    lots = random.Random(0)
    assert {made.draw_path(lots.random) for _ in range(50)} == {(0, 1), (0, 2)}


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_every_request_is_served(scheduling: str) -> None:
    served = replay(board(), scheduling, 2, 8 * SIZE, 4 * SIZE)
    assert served is not None
    assert len(served.latencies_ms) == 300
    assert served.loads > 0


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_with_all_experts_there_nothing_is_loaded(scheduling: str) -> None:
    whole = 2 * EXPERTS * SIZE
    served = replay(board(), scheduling, 1, 2 * whole, whole)
    assert served is not None
    assert served.loads == 0


def test_without_room_for_a_request_nothing_is_served() -> None:
    assert replay(board(), "coserve", 2, 4 * SIZE + 2_999, 4 * SIZE) is None
    assert replay(board(), "coserve", 2, 4 * SIZE + 3_000, 4 * SIZE) is not None


def test_what_fits_leaves_each_executor_one_request() -> None:
    own = board()
    assert own.least_bytes(2) == 2 * (SIZE + 1_500)
    assert own.fitting(own.least_bytes(2), 2) == 2
    assert own.fitting(own.least_bytes(2) - 1, 2) == 0
    assert own.fitting(10**9, 2) == EXPERTS
    assert own.fitting_beside_full_batches(2 * (SIZE + 8_500) + SIZE, 2) == 3
    assert own.fitting_beside_full_batches(2 * (SIZE + 8_500) - 1, 2) == 0
    assert own.ranked == np.argsort(-own.usage, kind="stable").tolist()


def test_fewer_executors_win_where_more_serve_as_much() -> None:
    equal = {1: trial(3, 1), 2: trial(2, 1)}
    assert best_count(equal) == 1


def test_numbers_of_executors_that_do_not_fit_are_left_out() -> None:
    own = board()
    small = config(memory_bytes=own.least_bytes(2) - 1)
    trials = try_executors(own, small, replayed(own, small), lambda *_: None)
    assert list(trials) == [1]
    least = config(memory_bytes=own.least_bytes(1) - 1)
    with pytest.raises(BudgetTooSmall, match=r"give at least 11\.2 KiB"):
        try_executors(own, least, replayed(own, least), lambda *_: None)


def test_the_drawn_number_is_taken_where_that_is_asked() -> None:
    own, drawing = board(), config(draws=True, seed=4)
    for found in try_executors(own, drawing, replayed(own, drawing), lambda *_: None).values():
        assert found.residents == found.drawn
        assert found.window[0] <= found.drawn <= found.window[1]


def test_the_choice_is_near_the_best_of_a_whole_sweep() -> None:
    """Intermediates are large here, so experts and batches compete for the memory."""
    large = costs(0.5, 4.0)
    own = board(ArchitectureCosts(
        load_ms=large.load_ms,
        bytes_by_batch={size: 4_000 * size for size in (1, 2, 4, 8)},
        by_executors=large.by_executors,
    ))  # fmt: skip
    tried = config(memory_bytes=14 * SIZE)
    serve = replayed(own, tried)
    sweep = {n: serve(1, own.expert_bytes(n, 1)) for n in range(1, own.fitting(tried.memory_bytes, 1) + 1)}
    found = choose_residents(own, tried, serve, 1)
    assert found.per_s[found.residents] >= 0.95 * max(sweep.values())


def test_points_that_matter_are_really_served() -> None:
    own, asked = board(), list[tuple[int, int]]()

    def really(executors: int, expert_bytes: int) -> float:
        asked.append((executors, expert_bytes))
        return 7.0

    found = serve_really(own, trial(3, 1), 2, really, lambda *_: None)
    assert found.served_per_s == {1: 7.0, 2: 7.0, 3: 7.0}
    assert asked == [(2, own.expert_bytes(residents, 2)) for residents in (1, 2, 3)]


def test_numbers_of_executors_that_are_tried() -> None:
    assert config(executors=3).counts == [1, 2, 3]
    assert config(executors=16).counts == [1, 2, 3, 4, 8, 16]
    assert config(executors=12).counts == [1, 2, 3, 4, 8, 12]


def test_bad_settings_are_named() -> None:
    with pytest.raises(UnknownName, match="coserve, pull"):
        config(scheduling="lru")
    with pytest.raises(InvalidConfig, match="at most 100"):
        config(initial_percent=0.0)
