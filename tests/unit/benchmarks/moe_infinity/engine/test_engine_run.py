"""The parts of the stage on the bundled model itself, whose experts are small: a few prompts, all arms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.open_arms import Fleet
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.arms.transformers_arms import write_offload_folder
from benchmarks.harness.children.processes import ArmFailed
from benchmarks.harness.inputs.shared_model import Ask, SharedModel
from benchmarks.harness.inputs.task_prompts import in_turn, shortened, stream_of, to_learn_from
from benchmarks.moe_infinity.engine import plots, stage, tables
from benchmarks.moe_infinity.engine.arms.accelerate_server import DiskOffloadServer
from benchmarks.moe_infinity.engine.arms.compared_policies import (
    DISK_OFFLOAD,
    KINDS,
    ON_DEMAND,
    ORACLE,
    ORACLE_AHEAD,
    PAPER,
    REUSE,
    kind_of,
)
from benchmarks.moe_infinity.engine.effort import Scale
from benchmarks.moe_infinity.engine.parts import (
    batch_server,
    beside_accelerate,
    by_batch_size,
    by_request_rate,
    one_record_or_tensors,
)
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import split_of
from greenroom.policies.base.expert_policy import ExpertPolicy

NAMES = (PAPER, REUSE, ON_DEMAND)
SERVED = (PAPER, ON_DEMAND)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GREENROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        with SharedModel(bundled_model_path()) as shared:
            yield shared


@pytest.fixture(scope="module")
def learnt(shared: SharedModel) -> Learnt:
    counts = np.random.default_rng(0).poisson(1.0, (5, shared.catalogue.size)).astype(np.float32)
    shape = tuple(shared.catalogue.experts_per_layer.tolist())
    return Learnt((EamcFile(model="", experts_per_layer=shape, matrices=counts, sequences=5),))


@pytest.fixture(scope="module")
def fleet(shared: SharedModel, learnt: Learnt) -> Iterator[Fleet]:
    with Fleet(shared, learnt, 1 / 3, KINDS) as fleet:
        yield fleet


SMALL = Scale(
    rounds=1, prompts=2, many_prompts=2, at_once=2, third_seconds=60, sizes=(1, 3), batch_tokens=2, batches_seconds=60,
    requests=3, loads=(0.5,), peer_loads=(0.5,), rates_seconds=60, shares=(0.5,), share_prompts=1, budgets_seconds=60,
    records=4, record_mib=(),
)  # fmt: skip


@pytest.fixture(scope="module")
def found(shared: SharedModel, learnt: Learnt) -> Iterator[dict[str, Any]]:
    """The whole stage, but on the bundled model, and where there is no accelerate."""

    @contextmanager
    def prepared(*_: object) -> Iterator[None]:
        raise ArmFailed("no accelerate")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GREENROOM_DATA", raising=False)
        patch.setattr(batch_server, "SETTLE_S", 0.0)
        patch.setattr(stage, "learn", lambda prompts: learnt)
        patch.setattr(stage, "widened", lambda mib: bundled_model_path())
        patch.setattr(beside_accelerate, "prepared", prepared)
        patch.setattr(stage, "KINDS", [kind_of(name) for name in NAMES])
        patch.setattr(stage, "SERVED", [kind_of(name) for name in SERVED])
        yield stage.run(SMALL)


def test_all_arms_give_the_same_answers_and_the_oracle_knows_them(found: dict[str, Any]) -> None:
    rows = found["one"]["rows"]
    assert list(rows) == [*NAMES, ORACLE, ORACLE_AHEAD]
    assert not found["failed"]
    assert all(row["same_answers"] for row in rows.values())
    assert rows[ORACLE]["departures"] == rows[ORACLE_AHEAD]["departures"] == 0
    assert rows[ORACLE]["mib_per_token"] < rows[ON_DEMAND]["mib_per_token"]
    assert rows[ON_DEMAND]["prefetches_per_token"] == 0
    assert rows[PAPER]["prefetches_per_token"] > 0
    for name in (PAPER, REUSE):
        assert 0 < rows[name]["events_share"] < rows[name]["policy_share"] < 1
    shares = [found[part]["lookup_share"] for part in ("one", "many")]
    assert found["lookup_share"] == max(shares) > 0
    assert found["stall_recovered"] == found["one"]["stall_recovered"]


def test_what_fails_costs_only_itself(found: dict[str, Any]) -> None:
    assert found["bounded"] == {"error": "ArmFailed: no accelerate"}
    assert found["speed_ratio_accelerate"] is None
    assert not any("error" in found[part] for part in ("one", "many", "batches", "rates", "budgets"))


def test_no_clock_is_left_on_a_policy(fleet: Fleet) -> None:
    turn = fleet[PAPER].run(in_turn(fleet.shared, 1), 1, look_inside=True)
    assert turn.policy_seconds["on_layer_routed"] > 0
    assert not vars(fleet[PAPER].policy).keys() & vars(ExpertPolicy).keys() - {"hooks", "prefetch", "target"}
    assert not fleet[PAPER].run(in_turn(fleet.shared, 1), 1).policy_seconds
    with pytest.raises(LookupError, match="lfru"):
        fleet["lfru"]


def test_accelerate_answers_beside_where_there_is_one(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_server, "SETTLE_S", 0.0)
    asked: list[int] = []

    def peer(asks: Sequence[Ask]) -> ServedTurn:
        asked.append(len(asks))
        if len(asks) > 2:
            raise ArmFailed("too much")
        return fleet[ON_DEMAND].run(asks, len(asks))

    first = by_batch_size.run(
        fleet, [ON_DEMAND], peer, sizes=(1, 3, 2), tokens=2, rounds=1, peer_rounds=1, seconds=60
    )  # fmt: skip
    assert [set(point["rows"]) for point in first["points"]] == [{ON_DEMAND, DISK_OFFLOAD}, {ON_DEMAND}, {ON_DEMAND}]
    assert [point["accelerate_error"] for point in first["points"]] == [None, "too much", None]
    second = by_request_rate.run(
        fleet, [ON_DEMAND], peer, requests=3, loads=(0.5, 0.001, 9.0), peer_loads=(0.001, 9.0), peer_requests=3,
        rounds=1, seconds=60,
    )  # fmt: skip
    answered = [{name: len(row["per_token_ms"]) for name, row in point["rows"].items()} for point in second["points"]]
    assert answered == [{ON_DEMAND: 3}, {ON_DEMAND: 3, DISK_OFFLOAD: 3}, {ON_DEMAND: 3}]
    assert [point["accelerate_error"] for point in second["points"]] == [None, None, "too much"]


def test_batches_rates_and_budgets_are_of_the_arms_that_serve(found: dict[str, Any]) -> None:
    assert [point["size"] for point in found["batches"]["points"]] == [1, 3]
    assert all(list(point["rows"]) == list(SERVED) for point in found["batches"]["points"])
    (point,) = found["rates"]["points"]
    assert {name: len(row["per_token_ms"]) for name, row in point["rows"].items()} == dict.fromkeys(SERVED, 3)
    assert found["rates"]["arrivals"] == "drawn"
    half, third = found["budgets"]["points"]
    assert (half["slots"], third["slots"]) == (48, 31)
    assert set(half["rows"]) == {"resident", *SERVED}
    assert half["rows"]["resident"]["over_resident"]["median"] == 1


def test_an_expert_is_read_whole_or_tensor_by_tensor(found: dict[str, Any], shared: SharedModel) -> None:
    (own,) = found["records"]
    assert [row["reads"] for row in own["ways"].values()] == [1, 2, 3]
    assert own["ways"][one_record_or_tensors.RECORD]["over_record"]["median"] == 1
    assert own["record_bytes"] == shared.expert_bytes


def test_what_was_found_is_json_a_table_and_a_picture_and_so_is_what_failed(
    found: dict[str, Any], tmp_path: Path
) -> None:
    assert json.loads(json.dumps(found))["one"]["rows"].keys() == found["one"]["rows"].keys()
    table = tables.table(found)
    assert "failed: ArmFailed: no accelerate" in table
    assert all(name in table for name in (*NAMES, ORACLE_AHEAD, "1 reads"))
    plots.draw(found, tmp_path / "engine.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in ("engine.png", "engine-load.png"))


def test_accelerates_requests_end_with_their_own_last_token(shared: SharedModel, tmp_path: Path) -> None:
    write_offload_folder(bundled_model_path(), tmp_path)
    arm = DiskOffloadServer(str(bundled_model_path()), str(tmp_path))
    asks = [replace(ask, answer_ids=(0,) * tokens) for ask, tokens in zip(in_turn(shared, 2), (3, 1), strict=True)]
    stream = stream_of(asks)
    batch = ServedTurn.of_answer(arm.serve(**stream.as_arguments()))
    long, short = batch.request_seconds
    assert 0 < short < long <= batch.seconds
    assert [len(ids) for ids in batch.ids] == [3, 1]
    alone = ServedTurn.of_answer(arm.run(**stream.as_arguments()))
    assert list(alone.inside) == ["0", "1"]
    assert sum(alone.inside.values()) == pytest.approx(alone.seconds, rel=0.2)
    arm.close()


def test_no_content_is_both_learnt_from_and_asked_for(shared: SharedModel) -> None:
    assert all(split_of(one.task, one.key) == "train" for one in to_learn_from(20))
    assert [ask.task for ask in in_turn(shared, 6)][:2] == ["summarise", "classify"]
    assert all(len(ask.answer_ids) <= 2 for ask in shortened(in_turn(shared, 6), 2))
