"""What foreseeing costs: shares of a served model's time, and a network of the paper's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.duoserve import cost
from benchmarks.duoserve.cost import QUICK, draw, mlp_us, random_mlp, share_of, table
from benchmarks.duoserve.engine import served
from benchmarks.harness.arms.served_turn import ServedTurn
from greenroom.core.artifacts.expert_mlp_file import HIDDEN
from greenroom.demo import bundled_model_path
from greenroom.predictor.kinds.expert_mlp.network import ExpertMlpPredictor


def turn_of(seconds: float, **policy: float) -> ServedTurn:
    return ServedTurn(seconds=seconds, tokens=1, ids=[[1]], steps=2, policy_seconds=policy)


def test_only_what_goes_beyond_the_other_policy_of_the_same_round_counts() -> None:
    ours = [turn_of(1.0, on_layer_routed=0.03, predictors=0.01), turn_of(2.0, on_layer_routed=0.04)]
    base = [turn_of(1.5, on_layer_routed=0.02), turn_of(2.0, on_layer_routed=0.04)]
    found = share_of(ours, base)
    assert found["over_reuse"] == {"median": pytest.approx(0.01), "min": 0.0, "max": pytest.approx(0.02)}
    assert found["policy_share"]["max"] == pytest.approx(0.04)
    assert found["us_a_step"] == {"on_layer_routed": pytest.approx(17_500), "predictors": pytest.approx(2_500)}


@pytest.mark.parametrize("many_hot", [False, True])
def test_the_network_is_as_wide_as_the_papers(many_hot: bool) -> None:
    file = random_mlp(many_hot=many_hot, layers=3, experts=8, top_k=2)
    widths = [matrix.shape[0] for matrix, _ in file.linear_layers]
    assert widths == [*HIDDEN, 8]
    picks = np.zeros((2, 3, 2), dtype=np.int64)
    assert ExpertMlpPredictor(file).logits(picks, 1).shape == (2, 8)


@pytest.mark.full  # its parts: here, in test_learning.py and in test_engine_stage.py
def test_the_whole_stage_runs_and_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(served, "widened", lambda mib: bundled_model_path())
    monkeypatch.setattr(cost, "LAYERS", 4)
    monkeypatch.setattr(cost, "EXPERTS", 16)
    monkeypatch.setattr(cost, "TOP_K", 2)
    monkeypatch.setattr(cost, "mlp_us", lambda rows, many_hot: {"median": 1.0, "min": 1.0, "max": 1.0})
    found: dict[str, Any] = cost.run(QUICK)
    assert found["predict_us_a_layer"] == found["decision"]["predict_us_a_layer"]
    assert found["predict_share"] == max(own["over_reuse"]["median"] for own in found["share"].values())
    assert "predictors" in found["share"]["1 at once"]["us_a_step"]
    assert "ExpertMLP" in table(found)
    pytest.importorskip("matplotlib")
    draw(found, tmp_path / "cost.png")


def test_a_call_of_the_network_takes_some_time() -> None:
    found = mlp_us(1, many_hot=False)
    assert found is not None
    assert 0 < found["min"] <= found["median"]
