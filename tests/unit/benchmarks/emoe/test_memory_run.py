"""The memory figures on the bundled model itself, whose experts are small: a few prompts, a few arms."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.emoe.memory.engine_arms import EXACT, PAPER, RESIDENT, Kind
from benchmarks.emoe.memory.stage import Scale, run
from greenroom.core.model_profile import load_model_profile
from greenroom.demo import bundled_model_path, bundled_profile_path
from greenroom.demo.tasks import TASKS

SCALE = Scale(
    shares=(0.4,), few_seeds=1, block=2, at_once=3, other_batches=(),
    kinds=(Kind("emoe-a", "emoe", PAPER, "flat", every=2), Kind("random", "static", PAPER, seed=0),
           Kind("agnostic", "emoe", PAPER, "flat", every=2, aware=False), Kind("on-demand", "lru", EXACT)),
)  # fmt: skip


class Flat:
    """Every expert alike."""

    def forecast(self, task_type: str, previous: NDArray[np.float32] | None) -> NDArray[np.float32]:
        return np.full((6, 16), 1 / 16, dtype=np.float32)


def test_arms_take_turns_on_the_same_prompts_and_only_those_that_reroute_differ_from_the_resident_model() -> None:
    profile = bundled_profile_path()
    assert profile is not None
    found = run(bundled_model_path(), load_model_profile(profile), SCALE, {"flat": Flat()})
    rows = {(row["arm"], row["fidelity"]): row for row in found["rows"]}
    resident, exact, emoe = rows[RESIDENT, EXACT], rows["on-demand", EXACT], rows["emoe-a", PAPER]
    assert resident["agreement"] == 1.0
    assert resident["bytes_moved"] == resident["approximated"] == 0
    assert exact["same_as_resident"] == exact["agreement"] == 1.0
    assert exact["bytes_moved"] > 0
    assert exact["approximated"] == 0
    assert emoe["forecasts"] > 0
    assert emoe["approximated"] > 0
    assert emoe["on_demand"] == 0
    assert emoe["experts_bytes"] == pytest.approx(0.4 * resident["experts_bytes"], rel=0.03)
    assert len(emoe["latency_ratio_blocks"]) == 5
    assert rows["random", PAPER]["bytes_moved"] == 0
    assert set(found["recovered"]["0.4"]) == {"emoe-a, paper", "agnostic, paper", "on-demand, exact"}
    assert set(emoe["agreement_by_task"]) == set(TASKS)
    assert all(share is None or 0 <= share <= 1 for share in emoe["same_by_task"].values())
    assert 0 < rows["agnostic", PAPER]["forecasts"] <= emoe["forecasts"], "there is but one type to ask of"
