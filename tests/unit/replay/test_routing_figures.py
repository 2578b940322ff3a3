"""The replay against an independent simulator's hit rates on the routing of a real model, gpt-oss-20b.

Needs that trace: GREENROOM_DATA names the folder that holds ``routing/gpt-oss-20b.npz``. The stream: sequences in
file order until 30,000 rows are used, one row of each running sequence a step, an ended one replaced at once; a
cache for all layers, empty at the start; all experts of the current group unevictable from its start.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.registry import create_policy
from greenroom.predictor.kinds.reuse.fit import fit
from greenroom.replay import ReplayResult, RoutingTrace, optimum, replay
from tests.real_data import real_data

TOKENS = 30_000
SLOTS = (96, 192, 256, 384)
PUBLISHED = {
    ("lru", 1): (44.6, 62.4, 75.4, 90.7),
    ("lru", 8): (0.0, 0.0, 0.0, 20.9),
    ("lfu-reset", 1): (6.2, 31.9, 40.8, 61.3),
    ("lfu-reset", 8): (0.0, 22.9, 25.6, 55.4),
    ("lfu", 1): (28.4, 50.6, 62.5, 80.9),
    ("lfu", 8): (16.9, 37.1, 49.7, 71.6),
    ("decayed", 1): (44.6, 68.1, 78.9, 91.7),
    ("decayed", 8): (4.9, 34.7, 49.7, 74.1),
}
# Of the two decays that were tried the better one was published.
OPTIONS: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("decayed", 1): {"decay": 0.999},
    ("decayed", 8): {"decay": 0.9998},
}
BELADY = {1: (63.5, 83.0, 89.6, 96.4), 8: (23.3, 46.9, 62.3, 84.6)}
TABLE = [
    (policy, concurrent, slots, rate)
    for (policy, concurrent), rates in PUBLISHED.items()
    for slots, rate in zip(SLOTS, rates, strict=True)
]
# Each policy, both concurrencies, every budget: the quickest such choice.
EVERY_DAY = [("lru", 1, 384), ("lfu", 8, 192), ("lfu-reset", 8, 96), ("decayed", 8, 256)]


@pytest.fixture(scope="module")
def trace() -> RoutingTrace:
    return RoutingTrace.load(real_data("routing/gpt-oss-20b.npz"))


@pytest.mark.parametrize(
    ("policy", "concurrent", "slots", "published"),
    [
        pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2]}", marks=[] if row[:3] in EVERY_DAY else [pytest.mark.full])
        for row in TABLE
    ],
)
def test_hit_rates_are_the_published_ones_to_a_tenth_of_a_point(
    trace: RoutingTrace, policy: str, concurrent: int, slots: int, published: float
) -> None:
    options = OPTIONS.get((policy, concurrent), {})

    result = counted(trace, policy, options, concurrent, slots)

    # The published figures are rounded to a tenth.
    assert 100 * result.hit_rate == pytest.approx(published, abs=0.0501)


def counted(
    trace: RoutingTrace, policy: str, options: Mapping[str, float], concurrent: int, slots: int
) -> ReplayResult:
    expert_policy = create_policy(policy, catalogue=trace.catalogue(), options=options)
    return replay(expert_policy, trace.steps(concurrent=concurrent, tokens=TOKENS), slots)


@pytest.mark.parametrize(("concurrent", "slots"), [(8, SLOTS), pytest.param(1, SLOTS, marks=pytest.mark.full)])
def test_beladys_hit_rates_are_the_published_ones(trace: RoutingTrace, concurrent: int, slots: tuple[int, ...]) -> None:
    for budget, published in zip(slots, BELADY[concurrent], strict=True):
        result = optimum(trace.catalogue(), trace.steps(concurrent=concurrent, tokens=TOKENS), budget)

        assert 100 * result.hit_rate == pytest.approx(published, abs=0.0501)


@pytest.mark.full
@pytest.mark.parametrize(("concurrent", "gained"), [(1, 1.3), (8, 0.7)])
def test_reuse_fitted_to_later_sequences_is_within_eight_points_of_belady(
    trace: RoutingTrace, concurrent: int, gained: float
) -> None:
    slots = 256
    later = trace.part(int(np.searchsorted(trace.seq_starts, TOKENS + 8 * int(np.diff(trace.seq_starts).max()))))
    catalogue = trace.catalogue()
    policy = create_policy("reuse", catalogue=catalogue)
    policy.on_artifact_swapped(artifact_of(catalogue, fit(later), "later"))

    rate = 100 * replay(policy, trace.steps(concurrent=concurrent, tokens=TOKENS), slots).hit_rate

    assert rate > BELADY[concurrent][SLOTS.index(slots)] - 8
    assert rate > 100 * counted(trace, "next-use", {}, concurrent, slots).hit_rate + gained
