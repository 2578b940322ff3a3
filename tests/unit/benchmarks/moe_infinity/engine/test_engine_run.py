"""The parts of the stage on the bundled model itself, whose experts are small: a few prompts, all arms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.emoe.memory_arms import Ask, World
from benchmarks.engine.peer_arms import write_offload_folder
from benchmarks.moe_infinity.engine import batches, budgets, plots, rates, records, report, serving, third
from benchmarks.moe_infinity.engine.fleet import Fleet
from benchmarks.moe_infinity.engine.kinds import DISK_OFFLOAD, KINDS, ON_DEMAND, ORACLE, ORACLE_AHEAD, PAPER, REUSE
from benchmarks.moe_infinity.engine.learnt import Learnt
from benchmarks.moe_infinity.engine.peer import DiskOffloadServer
from benchmarks.moe_infinity.engine.prompts import in_turn, shortened, stream_of, to_learn_from
from benchmarks.moe_infinity.engine.turns import ServedTurn
from greenroom.core.eamc_file import EamcFile
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import split_of

NAMES = {kind.name for kind in KINDS}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GREENROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        with World(bundled_model_path()) as world:
            yield world


@pytest.fixture(scope="module")
def learnt(world: World) -> Learnt:
    counts = np.random.default_rng(0).poisson(1.0, (5, world.catalogue.size)).astype(np.float32)
    shape = tuple(world.catalogue.experts_per_layer.tolist())
    return Learnt((EamcFile(model="", experts_per_layer=shape, matrices=counts, sequences=5),))


@pytest.fixture(scope="module")
def fleet(world: World, learnt: Learnt) -> Iterator[Fleet]:
    with Fleet(world, learnt, 1 / 3, KINDS) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def found(world: World, learnt: Learnt, fleet: Fleet) -> dict[str, Any]:
    """Every part but those that need processes of their own."""

    def peer(asks: Sequence[Ask]) -> ServedTurn:
        return fleet[ON_DEMAND].run(asks, len(asks))

    names = sorted(NAMES)
    kinds = [kind for kind in KINDS if kind.name in (PAPER, ON_DEMAND)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GREENROOM_DATA", raising=False)
        patch.setattr(serving, "SETTLE_S", 0.0)
        return {
            "failed": fleet.failed,
            "bounded": {"error": "no accelerate"},
            "one": third.run(fleet, prompts=3, at_once=2, rounds=1, seconds=60),
            "many": {"error": "left out"},
            "batches": batches.run(
                fleet, names, peer, sizes=(1, 3), tokens=2, rounds=1, peer_rounds=1, seconds=60),
            "rates": rates.run(
                fleet, names, peer, requests=3, loads=(0.5,), peer_loads=(0.5,), peer_requests=2, rounds=1,
                seconds=60),
            "budgets": budgets.run(world, learnt, kinds, shares=(0.5,), prompts=1, rounds=1, seconds=60),
            "records": [records.run(bundled_model_path(), experts=4, rounds=1, seconds=60)],
        }  # fmt: skip


def test_all_arms_give_the_same_answers_and_the_oracle_knows_them(found: dict[str, Any], fleet: Fleet) -> None:
    rows = found["one"]["rows"]
    assert set(rows) == {*NAMES, ORACLE, ORACLE_AHEAD}
    assert not fleet.failed
    assert all(row["same_answers"] for row in rows.values())
    assert rows[ORACLE]["departures"] == rows[ORACLE_AHEAD]["departures"] == 0
    assert rows[ORACLE]["mib_per_token"] < rows[ON_DEMAND]["mib_per_token"]
    assert rows[ON_DEMAND]["prefetches_per_token"] == 0
    assert rows[PAPER]["prefetches_per_token"] > 0
    for name in (PAPER, REUSE):
        assert 0 < rows[name]["events_share"] < rows[name]["policy_share"] < 1
    assert 0 < found["one"]["lookup_share"] < 1
    assert not any("victims" in vars(arm.policy) for arm in fleet.arms), "no clock is left on"
    with pytest.raises(LookupError, match="lfru"):
        fleet["lfru"]


def test_batches_are_answered_at_the_wanted_length_and_a_peer_beside(found: dict[str, Any]) -> None:
    assert [point["size"] for point in found["batches"]["points"]] == [1, 3]
    assert all(set(point["rows"]) == {*NAMES, DISK_OFFLOAD} for point in found["batches"]["points"])


def test_requests_come_at_rates_and_are_all_answered(found: dict[str, Any]) -> None:
    (point,) = found["rates"]["points"]
    assert {name: len(row["per_token_ms"]) for name, row in point["rows"].items()} == {
        **dict.fromkeys(NAMES, 3), DISK_OFFLOAD: 2
    }  # fmt: skip
    assert found["rates"]["arrivals"] == "drawn"


def test_budgets_are_held_against_the_resident_model(found: dict[str, Any]) -> None:
    (point,) = found["budgets"]["points"]
    assert point["slots"] == 48
    assert set(point["rows"]) == {"resident", PAPER, ON_DEMAND}
    assert point["rows"]["resident"]["over_resident"]["median"] == 1


def test_an_expert_is_read_whole_or_tensor_by_tensor(found: dict[str, Any], world: World) -> None:
    (own,) = found["records"]
    assert [row["reads"] for row in own["ways"].values()] == [1, 2, 3]
    assert own["ways"][records.RECORD]["over_record"]["median"] == 1
    assert own["record_bytes"] == world.expert_bytes


def test_what_was_found_is_json_a_table_and_a_picture_and_so_is_what_failed(
    found: dict[str, Any], tmp_path: Path
) -> None:
    assert json.loads(json.dumps(found))["one"]["rows"].keys() == found["one"]["rows"].keys()
    table = report.table(found)
    assert "failed: no accelerate" in table
    assert all(name in table for name in (*NAMES, DISK_OFFLOAD, ORACLE_AHEAD))
    plots.draw(found, tmp_path / "engine.png")
    assert (tmp_path / "engine.png").stat().st_size > 10_000


def test_accelerates_requests_end_with_their_own_last_token(world: World, tmp_path: Path) -> None:
    write_offload_folder(bundled_model_path(), tmp_path)
    arm = DiskOffloadServer(str(bundled_model_path()), str(tmp_path))
    asks = [replace(ask, answer_ids=(0,) * tokens) for ask, tokens in zip(in_turn(world, 2), (3, 1), strict=True)]
    stream = stream_of(asks)
    batch = ServedTurn.of_answer(arm.serve(**stream.as_arguments()))
    long, short = batch.request_seconds
    assert 0 < short < long <= batch.seconds
    assert [len(ids) for ids in batch.ids] == [3, 1]
    alone = ServedTurn.of_answer(arm.run(**stream.as_arguments()))
    assert list(alone.inside) == ["0", "1"]
    assert sum(alone.inside.values()) == pytest.approx(alone.seconds, rel=0.2)
    arm.close()


def test_no_content_is_both_learnt_from_and_asked_for(world: World) -> None:
    assert all(split_of(one.task, one.key) == "train" for one in to_learn_from(20))
    assert [ask.task for ask in in_turn(world, 6)][:2] == ["summarise", "classify"]
    assert all(len(ask.answer_ids) <= 2 for ask in shortened(in_turn(world, 6), 2))
