from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.emoe.scheduling.jobs import (
    CONVERSATION,
    AzureTraffic,
    of_profile,
    poisson,
    with_slos,
    with_wrong_labels,
    without_labels,
)
from greenroom.core.model_profile import Lengths
from greenroom.policies.base.events import UNKNOWN_TASK
from tests.unit.benchmarks.emoe.profiles import profile

POPULATION = of_profile(profile(), max_tokens=6)


def test_lengths_are_the_profiles_and_answers_end_at_their_limit() -> None:
    assert POPULATION.mean_output("short") == 2
    assert POPULATION.mean_output("long") == 6  # of 8
    assert POPULATION.mean_output(UNKNOWN_TASK) == 4


def test_without_a_distribution_lengths_lie_between_the_percentiles() -> None:
    task = profile().tasks["short"]
    spread = Lengths(mean=40, p50=40, p90=60, p99=90, most=100)
    known = structs.replace(profile(), tasks={"short": structs.replace(task, generated_tokens=spread)})
    drawn = sorted(tokens for _, tokens in of_profile(known, max_tokens=1000).pairs["short"])
    assert 20 <= drawn[0] <= drawn[-1] <= 100
    assert drawn[len(drawn) // 2] == pytest.approx(40, rel=0.1)
    assert drawn[int(0.9 * len(drawn))] == pytest.approx(60, rel=0.1)


def test_arrivals_are_poisson_and_tasks_uniform() -> None:
    jobs = poisson(POPULATION, rate=4.0, count=4000, seed=1)
    gaps = [b.at_ms - a.at_ms for a, b in itertools.pairwise(jobs)]
    assert statistics.fmean(gaps) == pytest.approx(250.0, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(250.0, rel=0.1)
    assert sum(job.task == "short" for job in jobs) / len(jobs) == pytest.approx(0.5, abs=0.03)
    assert len({job.request_id for job in jobs}) == len(jobs)


def test_one_seed_is_the_same_requests_at_every_rate() -> None:
    slow, fast = (poisson(POPULATION, rate, 50, seed=3) for rate in (1.0, 2.0))
    assert [(one.task, one.output_tokens) for one in slow] == [(one.task, one.output_tokens) for one in fast]
    assert [one.at_ms / 2 for one in slow] == pytest.approx([one.at_ms for one in fast])
    assert slow != poisson(POPULATION, 1.0, 50, seed=4)


def test_slos_are_multiples_of_what_the_task_takes_alone() -> None:
    alone = {"short": 100.0, "long": 300.0}
    jobs = with_slos(poisson(POPULATION, 1.0, 900, seed=0), alone, seed=0)
    multiples = [(job.slo_e2e_ms or 0) / alone[job.task] for job in jobs]
    assert {multiple: multiples.count(multiple) for multiple in set(multiples)}.keys() == {2.0, 5.0, 10.0}
    assert all(abs(multiples.count(multiple) - 300) < 60 for multiple in (2.0, 5.0, 10.0))


@pytest.mark.parametrize("accuracy", [1.0, 0.6, 0.0])
def test_labels_are_wrong_as_often_as_told_and_never_the_right_one(accuracy: float) -> None:
    jobs = with_wrong_labels(poisson(POPULATION, 1.0, 2000, seed=0), accuracy, seed=0)
    assert sum(job.label == job.task for job in jobs) / len(jobs) == pytest.approx(accuracy, abs=0.03)


def test_without_labels_nothing_is_known_of_the_task() -> None:
    assert {job.label for job in without_labels(poisson(POPULATION, 1.0, 20, seed=0))} == {UNKNOWN_TASK}


def test_recorded_traffic_keeps_its_gaps_and_lengths_and_its_first_half_is_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    rows = [f"{100 + number * number},{number + 1},{10 if number < 50 else 20}" for number in range(100)]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "99999,5000,10"]))
    traffic = AzureTraffic.read(file, longest=200)
    assert len(traffic.recorded) == 100  # the one that is too long is left out
    assert traffic.population.mean_output(CONVERSATION) == 10
    jobs = traffic.jobs(rate=2.0, count=50, seed=0)
    assert len(jobs) == 50
    assert {job.output_tokens for job in jobs} == {20}
    assert {job.max_tokens for job in jobs} == {20}
    assert jobs[-1].at_ms == pytest.approx(1e3 * 49 / 2.0)
    gaps = [b.at_ms - a.at_ms for a, b in itertools.pairwise(jobs)]
    assert gaps == sorted(gaps)  # as the squares that were recorded
