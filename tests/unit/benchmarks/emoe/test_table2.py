"""Table 2's own parts; what it measures with is tested beside the predictor."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.emoe import table2
from benchmarks.harness.inputs.bundled_routing import drawn_prompts
from greenroom.predictor.kinds.emoe.recorded import Recorded, read_recorded
from tests.pipeline.predictor.test_train_command import COUNT, recorded

PLAN = table2.Plan(seeds=2, epochs=1, prompts=0, backbones=("bert",), kinds=("emoe-a",))


def test_in_runs_every_prompt_comes_once_and_kinds_stay() -> None:
    asked = drawn_prompts(300)
    order = table2.in_runs(asked)
    assert sorted(order) == list(range(300))
    assert [asked[place].task for place in order] == [one.task for one in asked]
    for task in {one.task for one in asked}:
        kinds = [asked[place].kind for place in order if asked[place].task == task]
        changes = sum(one != other for one, other in itertools.pairwise(kinds))
        drawn = [one.kind for one in asked if one.task == task]
        at_random = sum(one != other for one, other in itertools.pairwise(drawn))
        assert changes <= len(Counter(kinds)) + len(kinds) / table2.RUN_OF
        assert changes < at_random or len(Counter(kinds)) == 1
    assert table2.in_runs(asked) == order


def test_reordered_sequences_keep_their_rows(tmp_path: Path) -> None:
    found = read_recorded(recorded(tmp_path / "t.npz"))
    order = list(reversed(range(COUNT)))
    other = table2.reordered(found, order)
    for place, (one, again) in enumerate(zip(reversed(list(found.picks())), other.picks(), strict=True)):
        np.testing.assert_array_equal(one, again)
        assert other.tasks[place] == found.tasks[order[place]]


def test_a_table_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "t.npz")
    result = table2.run(PLAN, trace=path, model_bytes=10_000_000)
    text = capsys.readouterr().out
    (found,) = result["tables"].values()
    learned = found["rows"]["bert emoe-a"]
    assert 0 < learned["share_of_model"] < 0.05
    assert learned["accuracy_sd"] >= 0
    assert found["rows"]["the prompt itself"]["overlap"] == pytest.approx(1)
    assert "12-16 %" in text
    json.dumps(result)
    table2.draw(result, tmp_path / "t.png")
    assert (tmp_path / "t.png").stat().st_size > 1000


def test_what_was_recorded_says_how_large_the_experts_are(tmp_path: Path) -> None:
    found = read_recorded(recorded(tmp_path / "t.npz"))
    assert table2.bytes_of(found.trace) is None
    assert isinstance(found, Recorded)


def test_quick_is_quick() -> None:
    quick, full = table2.plan_of(quick=True), table2.plan_of(quick=False)
    assert quick.seeds * quick.epochs * quick.prompts < full.seeds * full.epochs * full.prompts / 100
    assert full.seeds >= 3
