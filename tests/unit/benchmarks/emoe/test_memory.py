from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.emoe.memory.engine_arms import EXACT, KINDS, PAPER, RESIDENT
from benchmarks.emoe.memory.forecasters import Forecaster
from benchmarks.emoe.memory.stage import Stream, figures, recovery, table, tasks_of_block
from benchmarks.harness.reporting.statistics import interval
from greenroom.policies.base.events import Prediction
from greenroom.worker.generation_engine import RecordedRouting
from tests.unit.benchmarks.emoe.profiles import profile


def row(arm: str, *, share: float = 0.6, right: float = 1.0, agreement: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "arm": arm, "fidelity": EXACT if arm == RESIDENT else PAPER, "seed": None, "beside": share,
        "share": 1.0 if arm == RESIDENT else share, "right": right, "agreement": agreement, "same_as_resident": right,
        "seconds": 10.0, "latency_ratio": 1.0, "bytes_moved": 0, "predictor_seconds": 0.0,
        "at_once": 8, "latency_s": 1.0,
        "by_seed": {"right": [right] * 3, "agreement": [agreement] * 3, "seconds": [more.get("seconds", 10.0) / 3] * 3},
        **more,
    }  # fmt: skip


ROWS = [
    row(RESIDENT, right=0.8),
    row("emoe-a", right=0.7, agreement=0.95, seconds=10.4, latency_ratio=1.04, bytes_moved=5, predictor_seconds=0.1),
    row("no predictor", right=0.6, agreement=0.9, seconds=10.2),
    row("random", right=0.3, agreement=0.7, seed=0),
    row("random", right=0.5, agreement=0.9, seed=1),
]


def test_what_is_recovered_lies_between_random_and_resident() -> None:
    found = recovery(ROWS[1], ROWS)
    assert {name: one["mean"] for name, one in found.items()} == {
        "answers": pytest.approx(0.75), "agreement": pytest.approx(0.75)
    }  # fmt: skip
    assert {name: one["mean"] for name, one in recovery(ROWS[0], ROWS).items()} == {
        "answers": pytest.approx(1.0), "agreement": pytest.approx(1.0)
    }  # fmt: skip


def test_the_interval_is_that_of_streams_left_out() -> None:
    """Where random and resident are the same in all streams, what is recovered is linear and so is the interval."""
    rights = [0.7, 0.5, 0.9]
    ours = {**ROWS[1], "by_seed": {**ROWS[1]["by_seed"], "right": rights}}
    found = recovery(ours, ROWS)["answers"]
    linear = interval([(one / 0.8 - 0.5) / 0.5 for one in rights])
    assert found == {"mean": pytest.approx(linear["mean"]), "within": pytest.approx(linear["within"])}
    assert recovery(ROWS[1], ROWS)["answers"]["within"] == pytest.approx(0)


def test_figures_are_of_emoe_a_with_every_miss_rerouted() -> None:
    found = figures(ROWS)
    assert found["recovered_at_60"] == pytest.approx(0.75)
    assert "recovered_at_80" not in found
    assert found["latency_ratio_resident"] == 1.04
    assert found["overhead_share"] == pytest.approx(1 - 10.2 / 10.4)
    assert found["latency_ratio_interval"]["mean"] == pytest.approx(1.04)
    assert "emoe-a, paper" in table({**found, "rows": ROWS, "settings": {"at_once": 8}})
    assert found["by_batch"]["8"]["emoe-a, paper"]["ratio"] == 1.04


def test_without_a_byte_moved_a_latency_says_nothing() -> None:
    assert figures([ROWS[0], {**ROWS[1], "bytes_moved": 0}])["latency_ratio_resident"] is None


def test_every_arm_has_a_name_of_its_own_and_says_its_fidelity() -> None:
    assert max(Counter(kind.key for kind in KINDS).values()) == 1
    assert all(kind.fidelity in kind.key for kind in KINDS)


def test_each_block_has_a_task_type_that_most_of_its_prompts_are_of_and_the_next_another() -> None:
    for seed in range(1, 6):
        most = [Counter(tasks_of_block(seed, place, 20)).most_common(1)[0] for place in range(5)]
        assert all(count >= 14 for _, count in most)
        assert len({task for task, _ in most}) == 5
    assert tasks_of_block(1, 0, 20) == tasks_of_block(1, 0, 20) != tasks_of_block(2, 0, 20)


def test_what_prompts_or_blocks_gave_is_told_apart_by_stream() -> None:
    made = Stream(((), *(((),) * 4)), (1, 1, 2, 2))
    assert made.by_seed([1, 2, 3, 4]) == [[1, 2], [3, 4]]
    assert made.by_seed([1, 2, 3, 4, 5, 6, 7, 8]) == [[1, 2, 3, 4], [5, 6, 7, 8]]


class Fixed:
    def __init__(self) -> None:
        self.asked: list[tuple[str, NDArray[np.float32] | None]] = []

    def forecast(self, task_type: str, previous: NDArray[np.float32] | None) -> NDArray[np.float32]:
        self.asked.append((task_type, previous))
        return np.full((2, 4), 0.25, dtype=np.float32)


def test_a_forecast_is_asked_for_once_in_so_many_prompts_and_goes_by_the_last_one_that_ended() -> None:
    predictor, heard = Fixed(), list[Prediction]()
    forecaster = Forecaster(predictor, 3, profile(), 2, heard.append)
    forecaster.prompt_begun(["short"])
    forecaster.finished("short", RecordedRouting(np.zeros((5, 2, 1), dtype=np.uint8), 3, 4))
    for _ in range(3):
        forecaster.prompt_begun(["short", "long"])
    assert [task for task, _ in predictor.asked] == ["short", "short", "long"]
    popular, own = predictor.asked[0][1], predictor.asked[1][1]
    assert popular is not None
    assert own is not None
    assert popular[0].tolist() == pytest.approx([0.6, 0.4, 0.0, 0.0])  # by the profile, as nothing had ended
    assert own.tolist() == [[1.0, 0.0, 0.0, 0.0]] * 2
    assert [one.values.shape for one in heard] == [(8,)] * 3
    assert forecaster.seconds > 0


def test_tasks_that_are_sensitive_nowhere_are_not_asked_for() -> None:
    predictor = Fixed()
    forecaster = Forecaster(predictor, 3, profile(), 1, lambda _: None)  # of one layer, at which "long" is insensitive
    forecaster.prompt_begun(["long"])
    assert predictor.asked == []
    forecaster.prompt_begun(["short"])  # still due
    assert [task for task, _ in predictor.asked] == ["short"]
