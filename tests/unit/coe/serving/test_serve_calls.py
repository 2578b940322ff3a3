from __future__ import annotations

import pytest

from greenroom.coe.serving.serve_calls import Call, serve_calls
from greenroom.core.errors import ModelBroken
from tests.unit.coe.serving.scripted_collaboration import DEADLY, SELECTIONS, Scripted, path_of


def test_every_call_has_its_answer_and_its_time() -> None:
    calls = [Call(place / 2, bytes([place]), "abcd"[place % 4]) for place in range(40)]
    with Scripted(SELECTIONS["pull"]) as scripted:
        scripted.store.open()
        answers = serve_calls(scripted.engine, calls, timeout_s=60)
    for call, outcome in zip(calls, answers.outcomes, strict=True):
        assert isinstance(call.given, bytes)
        assert outcome.path == tuple(name for name, _ in path_of(call.given, call.value))
    assert len(answers.latencies_ms) == 40
    assert min(answers.latencies_ms) > 0
    assert answers.total_ms >= calls[-1].arrives_ms
    assert answers.per_s == pytest.approx(40_000 / answers.total_ms)


def test_an_end_of_the_engine_is_told() -> None:
    with Scripted(SELECTIONS["coserve"]) as scripted:
        scripted.store.open()
        with pytest.raises(ModelBroken):
            serve_calls(scripted.engine, [Call(0.0, DEADLY, "d"), Call(0.0, b"\0", "a")])


def test_what_does_not_end_is_told() -> None:
    with Scripted(SELECTIONS["pull"], held=True) as scripted:
        scripted.store.open()
        with pytest.raises(TimeoutError, match="1 of 1 calls"):
            serve_calls(scripted.engine, [Call(0.0, b"\0", "a")], timeout_s=0.1)
