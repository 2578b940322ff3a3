"""Telling the policy what is here costs what has changed, not what is here."""

from __future__ import annotations

from collections import Counter

import pytest

from greenroom.moe.batch import queue_description
from greenroom.moe.batch.batch_engine import AuditError
from greenroom.policies.batching.batch_policy import BatchDecision, BatchPolicy, BatchState
from greenroom.policies.batching.fcfs import FcfsBatching
from tests.contract.batching.harness import Answer, Driver, request
from tests.unit.batching.fake_model import FakeModel


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many sequences were described, waiting and running."""
    counts: Counter[str] = Counter()
    for name in ("WaitingSequence", "RunningSequence"):
        made = getattr(queue_description, name)

        def counted(*args: object, _name: str = name, _made: type = made, **options: object) -> object:
            counts[_name] += 1
            return _made(*args, **options)

        monkeypatch.setattr(queue_description, name, counted)
    return counts


class Recording(BatchPolicy):
    """First come, first served; keeps what it was told last."""

    def __init__(self) -> None:
        self.told: list[BatchState] = []

    def decide(self, state: BatchState) -> BatchDecision:
        self.told.append(state)
        return FcfsBatching().decide(state)


def test_a_step_describes_no_waiting_and_no_decoding_request(described: Counter[str]) -> None:
    policy = Recording()
    engine = Driver(FakeModel().as_ragged(), policy=policy, max_running=64).engine
    for n in range(320):
        engine.add(engine.new_sequence(request(f"r{n}", (1, 2), 40), Answer().take))
    assert described == {"WaitingSequence": 320}
    engine.step()
    started = Counter(described)
    assert started == {"WaitingSequence": 320, "RunningSequence": 2 * 64}, "once started, once its prompt was read"
    for _ in range(20):
        engine.step()
    assert described == started
    assert (len(policy.told[-1].running), len(policy.told[-1].waiting)) == (64, 256)
    assert policy.told[-1].waiting is policy.told[-2].waiting
    assert policy.told[-1].running is policy.told[-2].running
    engine.cancel(next(iter(engine.running)))
    engine.step()
    assert described - started == {"RunningSequence": 2}, "those that took its place"


def test_of_all_requests_only_a_long_prompt_is_described_anew_with_each_chunk(described: Counter[str]) -> None:
    policy = Recording()
    engine = Driver(FakeModel().as_ragged(), policy=policy, prefill_chunk=4).engine
    for n in range(8):
        engine.add(engine.new_sequence(request(f"r{n}", (1, 2), 40), Answer().take))
    engine.step()
    engine.add(engine.new_sequence(request("long", (5,) * 12, 40), Answer().take))
    before = Counter(described)
    lefts = []
    for _ in range(4):
        engine.step()
        lefts.append([running.prefill_left for running in policy.told[-1].running])
    assert lefts == [[0] * 8, [0] * 8 + [8], [0] * 8 + [4], [0] * 9]
    assert described - before == {"RunningSequence": 1 + 3}


def test_the_audit_finds_a_description_that_is_out_of_date() -> None:
    d = Driver(FakeModel().as_ragged())
    d.add(request("a", (1, 2), 9))
    d.step()
    next(iter(d.engine.running.values())).settled += 5
    with pytest.raises(AuditError, match="told of other sequences"):
        d.engine.audit()
