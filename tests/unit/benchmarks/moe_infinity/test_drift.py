"""§8.5: what a sequence's recall is, and the stage on the smallest scale."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.moe_infinity import drift
from benchmarks.moe_infinity.simulated_models import Model
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.policies.base.events import Artifact
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.replay import RoutingTrace
from tests.unit.benchmarks.moe_infinity.tiny_worlds import tiny


def test_the_recall_of_each_sequence_is_the_policys() -> None:
    picks = np.array([[[0], [1]], [[0], [1]], [[2], [2]]], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 2, 3]), 3)
    policy = MoeInfinity(trace.catalogue())
    policy.on_artifact_swapped(Artifact("eamc", "1", {"matrices": np.array([[1, 0, 0, 0, 1, 0]])}))
    assert list(drift.recalls(policy, trace)) == [(0, 1.0), (1, 0.0)]


async def rebuilt_here(model: Model, name: str, kept: Sequence[NDArray[np.float32]], recorded: int) -> EamcFile:
    assert 0 < recorded <= len(kept) - 120
    assert len(kept) > 120  # what the collection was made of, what was served before the shift, and some after it
    experts = (model.shape.experts,) * model.shape.layers
    return EamcFile(model=name, experts_per_layer=experts, matrices=np.stack(kept), sequences=len(kept))


def test_recall_falls_with_the_shift_and_recovers_with_the_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "MODELS", {"tiny": tiny()})
    monkeypatch.setattr(drift, "_rebuilt", rebuilt_here)  # the process is the predictor's to test
    scale = drift.Scale(seeds=1, learnt=60, before=60, until=250, after=60, timed=2, models=("tiny",))

    found = drift.run(scale)

    (row,) = found["rows"]
    assert row["shifted"]["mean"] < row["before"]["mean"]
    assert row["rebuilt"]["mean"] > row["shifted"]["mean"]
    assert 0 < row["until_trigger"]["mean"] <= 250
    assert row["meanwhile_1"]["mean"] > 0
    assert len(row["series"]["before"]) == 60
    json.dumps(found)
    assert "tiny" in drift.table(found)
    drift.draw(found, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 0
