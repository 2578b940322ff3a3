from __future__ import annotations

import pytest

from benchmarks.engine.link_bound import bound_seconds, over_bound
from benchmarks.harness.reporting.statistics import Spread
from benchmarks.harness.rows import Row, agreement, fastest, find, speed_ratio
from tests.unit.benchmarks.made_turns import row, trace, turn


def test_a_spread_is_the_median_and_the_ends() -> None:
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert Spread.of([]) is None


def test_ratios_are_taken_round_by_round() -> None:
    """The machine was half as fast in the second round; the ratio is that of the systems, not of the rounds."""
    ours, peer = row("s", "m", "greenroom", [1.0, 2.0]), row("s", "m", "peer", [2.0, 4.0])
    assert speed_ratio(ours, peer) == Spread(2.0, 2.0, 2.0)
    assert speed_ratio(peer, ours) == Spread(0.5, 0.5, 0.5)


def test_only_rounds_that_both_have_count() -> None:
    ours, peer = row("s", "m", "greenroom", [1.0, 1.0, 1.0]), row("s", "m", "peer", [9.0, 3.0])
    del peer.turns[1]
    assert speed_ratio(ours, peer) == Spread(3.0, 3.0, 3.0)
    peer.turns.clear()
    assert speed_ratio(ours, peer) is None
    assert speed_ratio(ours, None) is None


@pytest.mark.parametrize(
    ("moved", "link", "computed", "bound"),
    [(100, 50.0, 1.0, 2.0), (100, 50.0, 3.0, 3.0), (0, 50.0, 0.5, 0.5)],
)
def test_the_bound_is_the_longer_of_computing_and_moving(
    moved: int, link: float, computed: float, bound: float
) -> None:
    assert bound_seconds(turn(9.0, bytes_moved=moved, link=link), turn(computed)) == bound


def test_time_over_the_bound_is_of_the_link_as_it_was_in_the_round() -> None:
    resident = row("s", "m", "greenroom", [1.0, 1.0])
    third = row("s", "m", "greenroom", [3.0, 6.0], each={"bytes_moved": 100})
    third.turns[1].link, third.turns[2].link = 50.0, 25.0
    assert over_bound(third, resident) == Spread(1.5, 1.5, 1.5)
    third.turns[2].link = None
    assert over_bound(third, resident) is None, "no bound without a measured link"


def test_moved_over_belady_counts_all_bytes() -> None:
    measured = row("s", "m", "greenroom", [1.0, 1.0, 1.0], trace=trace(belady=40))
    for number, moved in enumerate((60, 80, 100), start=1):
        measured.turns[number].bytes_moved = moved
    assert measured.belady_bytes == 40
    assert measured.moved_over_belady == 2.0
    measured.trace = trace(belady=0)
    assert measured.moved_over_belady is None


def test_peak_is_the_highest_of_the_rounds_and_hits_are_of_all() -> None:
    measured = row("s", "m", "greenroom", [1.0, 1.0], each={"look_ups": 10})
    measured.turns[1].peak_bytes, measured.turns[2].peak_bytes = 5, 7
    measured.turns[1].hits, measured.turns[2].hits = 4, 8
    assert measured.peak_bytes == 7
    assert measured.hit_rate == 0.6
    empty = Row("s", "m", "greenroom")
    assert (empty.peak_bytes, empty.hit_rate, empty.tokens_per_s, empty.bytes_moved) == (None, None, None, None)


def test_agreement_is_the_share_of_prompts_with_equal_tokens() -> None:
    reference = row("s", "m", "greenroom", [1.0], each={"ids": [[1, 2], [3], [4]]})
    assert agreement(row("s", "m", "peer", [1.0], each={"ids": [[1, 2], [9], [4]]}), reference) == pytest.approx(2 / 3)
    assert agreement(row("s", "m", "peer", [1.0], each={"ids": [[1, 2]]}), reference) == 1.0, "only what both ran"
    assert agreement(row("s", "m", "peer", []), reference) is None


def test_find_and_fastest_pass_over_rows_without_turns() -> None:
    slow, fast = row("s", "m", "peer", [2.0], policy="a"), row("s", "m", "peer", [1.0], policy="b")
    failed = row("s", "m", "peer", [], policy="c", error="out of memory")
    assert fastest([slow, failed, fast]) is fast
    assert fastest([failed]) is None
    assert find([failed, slow, fast], system="peer") is slow
    assert find([slow, fast], policy="c") is None
