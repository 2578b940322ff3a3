"""The figures, against ones worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom_load.caveats import caveats, too_slow
from greenroom_load.figures import Spread, figures, token_times
from greenroom_load.reply_record import FailureKind
from greenroom_load.series import bin_width, distributions, series
from greenroom_load.targets import Targets
from tests.unit.loadgen.fakes import failed, outcome, record


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_a_spread_is_numpys(seconds: list[float]) -> None:
    spread = Spread.of([*seconds, None])

    assert spread.n == len(seconds)
    assert spread.mean == pytest.approx(np.mean(seconds) * 1e3)
    assert spread.median == pytest.approx(np.median(seconds) * 1e3)
    assert spread.std == pytest.approx(np.std(seconds) * 1e3, abs=1e-6)
    assert spread.percentiles[99] == pytest.approx(np.percentile(seconds, 99) * 1e3)


def test_nothing_measured_is_not_a_number_rather_than_0() -> None:
    spread = Spread.of([None])

    assert spread.n == 0
    assert math.isnan(spread.mean)
    assert math.isnan(spread.percentiles[99])


def test_latencies_of_one_request() -> None:
    """Intended at 1.0, sent at 1.5, tokens at 1.6, 1.62, 1.64 and 1.66."""
    found = figures(outcome(record(intended_s=1.0, sent_s=1.5, first_s=1.6, end_s=1.66))).whole.latencies

    assert found.ttft.mean == pytest.approx(100)
    assert found.ttft_intended.mean == pytest.approx(600)
    assert found.e2el.mean == pytest.approx(160)
    assert found.e2el_intended.mean == pytest.approx(660)
    assert found.tpot.mean == pytest.approx(20)
    assert found.itl.n == 3
    assert found.itl.mean == pytest.approx(20)


def test_a_reply_of_one_token_has_no_tpot_and_counts_as_0_for_goodput() -> None:
    one = record(output_tokens=1, gaps_s=(), end_s=0.1)
    found = figures(outcome(one), Targets(tpot_ms=1))

    assert found.whole.latencies.tpot.n == 0
    assert found.good == 1


def test_failed_requests_have_no_latency_but_count() -> None:
    found = figures(outcome(record(0), failed(1), failed(2), failed(3, FailureKind.TIMEOUT, "after 5 s")))

    assert (found.whole.requests, found.whole.completed, found.whole.failed) == (4, 1, 3)
    assert found.whole.failures == {"429: saturated": 2, "timeout: after 5 s": 1}
    assert found.whole.latencies.ttft.n == found.whole.latencies.e2el.n == 1


def test_throughput_and_goodput() -> None:
    """Ten requests from 0 to 9 s, the last reply at 9.16 s; every other one is slow, the last one fails."""
    records = [record(n, **({"first_s": n + 0.155} if n % 2 else {})) for n in range(9)]
    found = figures(outcome(*records, failed(9), duration_s=10.0, sending_s=9.0), Targets(ttft_ms=120))

    assert found.request_throughput == pytest.approx(0.9)
    assert found.offered_rate == pytest.approx(10 / 9)
    assert found.good == 5
    assert found.request_goodput == pytest.approx(0.5)
    assert found.output_throughput == pytest.approx(9 * 4 / 10)
    assert found.total_token_throughput == pytest.approx(9 * 14 / 10)


def test_goodput_counts_from_when_a_request_was_to_be_sent() -> None:
    """No coordinated omission: one held back by the generator was late for its user all the same."""
    late = record(intended_s=0.0, sent_s=5.0, first_s=5.1, end_s=5.16)

    assert figures(outcome(late), Targets(ttft_ms=200)).good == 0
    assert figures(outcome(record()), Targets(ttft_ms=200)).good == 1


def test_attainment_is_by_task_and_failures_miss_it() -> None:
    tight, loose = Targets(ttft_ms=50), Targets(ttft_ms=500, e2e_ms=1000)
    found = figures(
        outcome(
            record(0, task="question", targets=loose),
            record(1, task="question", targets=loose),
            failed(2, task="question", targets=loose),
            record(3, task="compare", targets=tight),
            record(4, task=None),
        )
    )

    assert found.by_task["question"].attainment == pytest.approx(2 / 3)
    assert found.by_task["compare"].attainment == 0
    assert found.by_task["-"].attainment is None
    assert found.whole.attainment == pytest.approx(2 / 4)


def test_what_was_approximated_is_the_mean_of_the_replies_that_say_it() -> None:
    records = [record(0, approximated=0.0), record(1, approximated=0.5), record(2), failed(3, approximated=1.0)]
    assert figures(outcome(*records)).whole.approximated == 0.25
    assert figures(outcome(record(0))).whole.approximated is None


def test_answers_are_checked_where_known() -> None:
    found = figures(
        outcome(
            record(0, expected="yes"), record(1, expected="no"), record(2), failed(3, expected="yes"),
        )
    ).whole  # fmt: skip

    assert (found.checked, found.right) == (2, 1)


def test_what_was_done_while_sending_leaves_the_drain_out() -> None:
    """Sent at 0, 1, 2 and 3 s; the replies end at 0.16, 1.16 and, far behind the last send, twice at 9 s."""
    records = [record(0), record(1), *(record(n, first_s=8.94, end_s=9.0) for n in (2, 3))]
    found = figures(outcome(*records))

    assert found.finished_while_sending == 2
    assert found.tokens_while_sending == 8
    assert (found.sent_late_half, found.finished_late_half) == (2, 0)
    assert found.mean_in_flight == pytest.approx((0.16 + 0.16 + 7 + 6) / 9)


def test_late_sends_are_counted() -> None:
    found = figures(outcome(record(0), record(1, sent_s=1.009), record(2, sent_s=2.011, first_s=2.1)))

    assert (found.late, found.lateness.n) == (1, 3)


@given(parts=st.integers(1, 20), tokens=st.integers(1, 60))
def test_every_token_has_a_time_and_it_is_that_of_a_part(parts: int, tokens: int) -> None:
    one = record(first_s=1.0, gaps_s=(0.5,) * (parts - 1), output_tokens=tokens)
    times = token_times([one])

    assert len(times) == tokens
    assert list(times) == sorted(times)
    assert times[0] == 1.0
    assert set(times) <= {1.0 + 0.5 * part for part in range(parts)}


def test_a_slow_generator_is_told_on() -> None:
    prompt_one = [record(n) for n in range(200)]
    quick = figures(outcome(*prompt_one))
    late = figures(outcome(*(record(n, sent_s=n + 0.05) for n in range(200))))
    lagging = figures(outcome(*prompt_one, lags_s=(0.02,) * 100, cpu_share=0.95))

    assert too_slow(quick, closed_loop=False) == []
    assert "200 of 200" in too_slow(late, closed_loop=False)[0]
    assert too_slow(late, closed_loop=True) == [], "a bound on concurrency holds requests back on purpose"
    assert ["lagged by 20.0 ms" in reason or "95%" in reason for reason in too_slow(lagging, closed_loop=False)] == [
        True,
        True,
    ]


def test_caveats_name_what_a_reader_must_know() -> None:
    counted = record(0, tokens_counted=True, prompt_tokens=None, gaps_s=(0.0, 0.0, 0.06), repeat=True)
    said = "\n".join(
        caveats(
            figures(outcome(counted, failed(1, FailureKind.NOT_SENT, "max_outstanding"))),
            interrupted=True,
            closed_loop=False,
        )
    )

    for part in ("interrupted", "1 of 2 requests failed", "could not be sent", "fewer than 100", "no token counts",
                 "prompt tokens", "67% of the gaps", "asked before"):  # fmt: skip
        assert part in said
    assert caveats(figures(outcome(*(record(n) for n in range(200)))), interrupted=False, closed_loop=False) == []


def test_a_run_over_time() -> None:
    found = series([record(0), record(1), failed(1, end_s=1.3), record(2, first_s=4.1, end_s=4.16)], duration_s=4.16)
    width = found["bin_s"]

    def at(name: str, second: float) -> Any:
        return found[name][int(second / width)]

    assert width == 0.25, "20 bins at least"
    assert len(found["start_s"]) == 17
    assert sum(found["intended"]) == sum(found["ended"]) == 4
    assert (at("intended", 1.0), at("failed", 1.3)) == (2, 1)
    assert sum(found["tokens"]) == 12
    assert at("ttft_p50_ms", 2.0) == pytest.approx(2100)
    assert at("ttft_p50_ms", 3.0) is None
    assert at("itl_p99_ms", 4.16) == pytest.approx(20)
    assert at("in_flight", 3.0) == 1.0
    assert sum(found["in_flight"]) * width == pytest.approx(0.16 + 0.16 + 0.3 + 2.16, abs=1e-3)


@given(st.floats(0.001, 1e6), st.integers(0, 10_000))
def test_a_picture_has_no_more_bins_than_can_be_seen_or_filled(duration_s: float, requests: int) -> None:
    bins = math.ceil(duration_s / bin_width(duration_s, requests))

    assert bins <= min(121, max(21, requests / 5 + 1))
    assert bins >= 4 or duration_s < 5


def test_distributions_are_quantiles_from_0_to_1() -> None:
    found = distributions([record(n, first_s=n + 0.001 * (n + 1)) for n in range(101)])

    assert found["ttft_ms"][0] == pytest.approx(1)
    assert found["ttft_ms"][100] == pytest.approx(51)
    assert found["ttft_ms"][200] == pytest.approx(101)
    assert len(found["ttft_ms"]) == found["steps"] + 1
    assert "tpot_ms" not in distributions([record(output_tokens=1)])


def test_an_empty_run_has_figures_too() -> None:
    found = figures(outcome(), Targets(ttft_ms=1))

    assert (found.whole.requests, found.good, found.request_throughput, found.request_goodput) == (0, 0, 0.0, 0.0)
    assert distributions([]) == {"steps": 200}
    assert series([], 0.0)["intended"] == [0]
