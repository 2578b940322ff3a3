"""What a policy takes, by method: everything that the engine calls is timed."""

from __future__ import annotations

from benchmarks.harness.arms.policy_clock import LOOK_UP, PolicyClock, of_events
from greenroom.policies.base.events import SequenceEnd
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.moe_infinity.policy import MoeInfinity

CATALOGUE = Catalogue.uniform("clock", layers=2, experts=4, top_k=1)


def test_what_the_engine_and_the_service_call_is_timed_and_nothing_after_the_clock_is_removed() -> None:
    policy = MoeInfinity(CATALOGUE)
    clock = PolicyClock(policy)
    own = policy.hooks | {LOOK_UP}
    assert own <= set(vars(policy)), "also what a service asks"
    policy.on_sequence_ended(1, SequenceEnd.FINISHED)
    policy.report(1)
    assert set(clock.seconds) == {"on_sequence_ended", "report"}
    assert of_events(clock.seconds) == clock.seconds["on_sequence_ended"]
    clock.remove()
    policy.report(1)
    assert not own & set(vars(policy))
