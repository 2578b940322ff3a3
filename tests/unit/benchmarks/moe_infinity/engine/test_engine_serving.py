"""When batches begin and how long requests take: no engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.moe_infinity.engine.parts.batch_server import Batching, Served, serve

BATCHING = Batching(most=4, wait_s=1.0)


@pytest.mark.parametrize(
    ("arrivals", "free_s", "begins", "count"),
    [
        ([0.0], 0.0, 1.0, 1),
        ([0.0, 0.5, 1.0, 1.1], 0.0, 1.0, 3),
        ([0.0, 0.1, 0.2, 0.3, 0.4], 0.0, 0.3, 4),
        ([0.0, 0.1, 0.2, 0.3, 0.4], 7.0, 7.0, 4),
        ([0.0, 5.0], 2.0, 2.0, 1),
        ([5.0], 2.0, 6.0, 1),
    ],
    ids=["waits for others", "goes when the first has waited", "goes when full", "waits for the server",
         "goes at once when it has waited long", "an idle server waits for others too"],
)  # fmt: skip
def test_a_batch_begins_when_it_is_full_or_its_first_has_waited_and_the_server_is_free(
    arrivals: list[float], free_s: float, begins: float, count: int
) -> None:
    assert BATCHING.form(arrivals, free_s) == (begins, count)


def asks(count: int) -> list[Ask]:
    return [Ask("question", (1,), (1, 2)) for _ in range(count)]


def answering(seconds: float, batches: list[int]) -> ServedTurn:
    count = batches[-1]
    return ServedTurn(seconds, 2 * count, [[1, 2]] * count, request_seconds=[seconds] * count)


def run(arrivals: Sequence[float], seconds: float) -> tuple[list[Served], list[int], list[float]]:
    batches: list[int] = []
    slept: list[float] = []

    def answer(batch: Sequence[Ask]) -> ServedTurn:
        batches.append(len(batch))
        return answering(seconds, batches)

    return serve(arrivals, asks(len(arrivals)), answer, BATCHING, sleep=slept.append), batches, slept


def test_what_comes_while_a_batch_runs_is_in_the_next() -> None:
    served, batches, slept = run([0.0, 1.5, 1.6, 9.0], 2.0)
    assert batches == [1, 2, 1]
    assert [one.began_s for one in served] == [1.0, 3.0, 3.0, 10.0]
    assert [one.ended_s for one in served] == [3.0, 5.0, 5.0, 12.0]
    assert served[1].per_token_s == pytest.approx(3.5 / 2)
    assert slept == pytest.approx([0.1, 0.1]), "of the idle times, what lets the engine settle"


@given(
    gaps=st.lists(st.floats(0, 3), min_size=1, max_size=40),
    seconds=st.floats(0.01, 5),
)
def test_every_request_is_answered_once_in_order_and_never_before_it_has_come(
    gaps: list[float], seconds: float
) -> None:
    arrivals = [sum(gaps[:place]) for place in range(len(gaps))]
    served, batches, _ = run(arrivals, seconds)
    assert [one.arrived_s for one in served] == arrivals
    assert sum(batches) == len(arrivals)
    assert max(batches) <= BATCHING.most
    begun = sorted({one.began_s for one in served})
    assert all(later - earlier >= seconds - 1e-6 for earlier, later in pairwise(begun))
    for one in served:
        assert one.arrived_s <= one.began_s < one.ended_s
