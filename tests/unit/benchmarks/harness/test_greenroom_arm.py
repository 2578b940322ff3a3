"""The arm that runs greenroom, on the bundled model, within this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.arms.greenroom_arm import GreenroomArm
from benchmarks.harness.arms.time_by_part import PARTS
from benchmarks.harness.inputs.token_streams import task_stream
from benchmarks.harness.turn import Turn
from greenroom.demo import bundled_model_path
from tests.stand_in_device import stand_in

STREAM = task_stream(bundled_model_path(), 3)


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GreenroomArm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GREENROOM_CACHE", str(tmp_path_factory.mktemp("cache")))
        arm = GreenroomArm(str(bundled_model_path()), "33%", "lru")
        yield arm
        arm.close()


def run(arm: GreenroomArm, **extra: object) -> Turn:
    return Turn.of_json(arm.run(**STREAM.as_arguments(), **extra))  # type: ignore[arg-type]


def own_methods(holder: object) -> dict[str, object]:
    """What hides the methods of its class."""
    return {name: value for name, value in vars(holder).items() if callable(value)}


def test_a_turn_generates_what_the_stream_says(third: GreenroomArm) -> None:
    turn = run(third)
    assert tuple(map(len, turn.ids)) == STREAM.lengths
    assert turn.tokens == STREAM.tokens
    assert 0 < turn.hits < turn.look_ups
    assert turn.bytes_moved == (turn.look_ups - turn.hits) * third.describe()["expert_bytes"], "on demand alone"
    assert turn.peak_bytes > 0
    assert run(third).ids == turn.ids
    assert run(third, concurrency=8).steps < turn.steps
    with pytest.raises(ValueError, match="1 or 8 requests"):
        run(third, concurrency=3)


def test_a_recorded_turn_knows_what_belady_would_move(third: GreenroomArm) -> None:
    turn = run(third, record=True)
    assert turn.trace is not None
    assert turn.trace.accesses == turn.look_ups
    assert 0 < turn.trace.belady_bytes <= turn.bytes_moved
    assert run(third).trace is None


def test_an_instrumented_turn_leaves_nothing_behind_and_accounts_for_all_time(third: GreenroomArm) -> None:
    plain = run(third)
    engine = third._llm.worker.loop.engine
    holders: list[object] = [
        engine,
        engine.model,
        engine.model.lean,
        third._llm.worker.experts,
        *engine.model.model.modules(),
    ]
    before = [own_methods(holder) for holder in holders]
    watched = run(third, inside=True)
    assert watched.ids == plain.ids
    assert set(watched.inside) == set(PARTS)
    assert sum(watched.inside.values()) == pytest.approx(watched.seconds)
    never = {"look-ahead"}  # lru asks for none
    assert all(seconds > 0 for part, seconds in watched.inside.items() if part not in never), watched.inside
    assert watched.inside["waiting"] == pytest.approx(watched.stall_seconds, rel=0.2, abs=0.02)
    assert [own_methods(holder) for holder in holders] == before


def test_an_instrumented_turn_sees_routers_run_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path))
    arm = GreenroomArm(str(bundled_model_path()), "33%", "look-ahead")
    try:
        assert run(arm, inside=True).inside["look-ahead"] > 0
    finally:
        arm.close()


def test_the_link_is_measured_on_request(third: GreenroomArm) -> None:
    link = run(third, link=True).link
    assert link is not None
    assert link > 0
    assert run(third).link is None


def test_the_oracle_knows_the_stream_and_moves_least(third: GreenroomArm) -> None:
    lru = run(third)
    arm = GreenroomArm(str(bundled_model_path()), "33%", "belady", oracle=STREAM.as_arguments(), oracle_turns=2)
    try:
        assert run(arm).ids == lru.ids
        second = run(arm, record=True)
        assert second.bytes_moved < lru.bytes_moved
        assert arm._llm.worker.experts.policy.departures == 0  # type: ignore[attr-defined]
    finally:
        arm.close()


@pytest.mark.parametrize("host", ["100%", pytest.param("0%", marks=pytest.mark.full)])
def test_on_a_device_bytes_and_link_are_those_of_what_fills_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str
) -> None:
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path))
    with stand_in(monkeypatch):
        arm = GreenroomArm(str(bundled_model_path()), "33%", "lru", device="cuda", host=host)
        try:
            turn = run(arm, link=True)
            assert turn.link is not None
            assert turn.link > 0
            assert turn.bytes_moved == (turn.look_ups - turn.hits) * arm.describe()["expert_bytes"]
            assert run(arm).ids == turn.ids
        finally:
            arm.close()
