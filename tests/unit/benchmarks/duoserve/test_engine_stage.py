"""The stage `engine`: its figures are those of the turns, and all of it runs on the bundled model as it is.

`make test` runs one of its parts, on a tiny model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.duoserve.engine import QUICK, Scale, draw, served, speed, stage, table
from benchmarks.duoserve.engine.ablation import PHASES, VARIANTS, ClaimsRoomForAll, Measured, Without, relative
from benchmarks.duoserve.engine.prompt_times import Prefills, _cell
from benchmarks.duoserve.engine.speed import BARE, BEST, MAPPED, OURS, Row, figures
from benchmarks.harness.arms.served_turn import PhaseTurn, ServedTurn
from benchmarks.harness.inputs.checkpoints import RandomMixtral
from benchmarks.harness.inputs.fitted import FitBoth
from benchmarks.harness.inputs.shared_model import Ask
from greenroom.demo import bundled_model_path
from greenroom.policies.base.expert_keys import Catalogue

SMALL = replace(QUICK, recorded=30, prompts=2, many_prompts=2, at_once=2, random_prompts=1, random_many=2, rows=(30,))
TINY = RandomMixtral(layers=2, experts=4, hidden=64, intermediate=64, heads=2, kv_heads=2)


def test_every_arm_of_a_tiny_model_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path))
    monkeypatch.setattr(served, "random_of_size", lambda mib: TINY)
    fits = FitBoth(path=replace(SMALL.fit.path, steps=5), reuse=replace(SMALL.fit.reuse, steps=5))
    with served.Random(replace(SMALL, fit=fits)) as tiny:
        own = speed.run(tiny, prompts=1, at_once=1, rounds=1, seconds=1.0)
    assert list(own["rows"]) == [OURS, *BEST, BARE.name]
    assert own["same_answers"]
    assert own["speed_ratio_best"] > 0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GREENROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(served, "widened", lambda mib: bundled_model_path())
        patch.setattr(served, "random_of_size", lambda mib: TINY)
        yield stage.run(SMALL)


def test_the_small_form_fits_all_that_it_fits_in_few_steps() -> None:
    assert max(QUICK.fit.reuse.steps, QUICK.fit.path.steps, QUICK.maps.steps) <= 100


@pytest.mark.full
def test_every_part_runs_and_every_arm_says_the_same(found: dict[str, Any]) -> None:
    for name in ("one", "many", "random_one", "random_many", "prompts", "ablation"):
        assert "error" not in found[name], found[name]
    for name in ("one", "many"):
        assert list(found[name]["rows"]) == [OURS, *BEST, BARE.name, *(kind.name for kind in MAPPED)]
        assert set(found[name]["maps_over_routers"]) == {OURS, *BEST}
        assert found[name]["same_answers"]
        ours = found[name]["rows"][OURS]
        assert ours["phases"]["prefill"]["steps"] > 0 < ours["phases"]["decode"]["steps"]
        assert ours["phases"]["prefill"]["link_busy"]["median"] > 0
    assert found["speed_ratio_best"] > 0 < found["speed_ratio_best_8"]
    assert found["prefill_bound_ratio"] > 0
    assert list(found["ablation"]["rows"]) == [OURS, *(kind.name for kind in VARIANTS), PHASES.name]
    assert not found["ablation"]["failed"]
    assert found["learnt"]["sequences"] == SMALL.recorded


@pytest.mark.full
def test_it_is_shown(found: dict[str, Any], tmp_path: Path) -> None:
    text = table(found)
    assert "duoserve over the better of the others" in text
    assert PHASES.name in text
    pytest.importorskip("matplotlib")
    draw(found, tmp_path / "engine.png")
    assert (tmp_path / "engine.png").exists()


def turn_of(seconds: float, phase: PhaseTurn) -> ServedTurn:
    return ServedTurn(
        seconds=seconds, tokens=10, ids=[[1]], bytes_moved=100, look_ups=4, hits=1, link=1000.0,
        phases={"prefill": phase, "decode": PhaseTurn()},
    )  # fmt: skip


def test_speed_is_held_against_the_better_one_of_each_round() -> None:
    seconds = {OURS: (1.0, 2.0, 1.0), BEST[0]: (2.0, 4.0, 3.0), BEST[1]: (4.0, 2.0, 4.0), BARE.name: (1.0, 2.0, 2.0)}
    phase = PhaseTurn(steps=2, seconds=0.5, stall_seconds=0.1, bytes_moved=100)
    rows = {
        name: Row(name, {number: turn_of(each, phase) for number, each in enumerate(own, start=1)})
        for name, own in seconds.items()
    }
    own = figures(rows, [Ask("any", (1, 2, 3), (4,))])
    assert own["ratio_by_round"] == [2.0, 1.0, 3.0]
    assert own["speed_ratio_best"] == 2.0
    assert own["bare_over_look_ahead"] == {"median": 2.0, "min": 1.5, "max": 2.0}
    assert own["prompt_rows"] == 3
    prefill = own["rows"][OURS]["phases"]["prefill"]
    assert prefill["link_busy"] == {"median": 0.2, "min": 0.2, "max": 0.2}, "100 bytes in half a second, of 1000"
    assert prefill["stall_share"] == pytest.approx(0.2)
    assert own["rows"][OURS]["phases"]["decode"]["link_busy"] is None


def test_a_prompt_is_bound_by_the_slower_of_computing_and_the_link() -> None:
    found = {1: {30: {"duoserve": Prefills((3.0, 4.0), (1000, 100)), "resident": Prefills((1.0, 2.0), (0, 0))}}}
    cell = _cell(30, "duoserve", found, {(1, 30, "duoserve"): 500.0})
    assert cell["over_bound"]["median"] == pytest.approx(7 / 4)
    assert cell["link_seconds"]["median"] == pytest.approx(1.1)


def test_a_change_is_held_against_the_whole_policy_of_the_same_round() -> None:
    own = relative({1: Measured(2.0, 3.0, 4.0), 2: Measured(1.0, 1.0, 1.0)},
                   {1: Measured(1.0, 6.0, 4.0), 2: Measured(1.0, 1.0, 2.0)})  # fmt: skip
    assert own["prompt"] == {"median": 1.5, "min": 1.0, "max": 2.0}
    assert own["one"]["min"] == 0.5
    assert own["many"]["max"] == 1.0


def test_a_variant_differs_in_what_its_name_says() -> None:
    catalogue = Catalogue.uniform("variant", layers=2, experts=4, top_k=1)
    assert all(isinstance(kind, Without) for kind in VARIANTS)
    assert isinstance(VARIANTS[0].create(catalogue), ClaimsRoomForAll)


def test_the_whole_run_takes_no_more_than_a_quarter_of_an_hour() -> None:
    assert sum(Scale().planned.values()) <= 15 * 60
