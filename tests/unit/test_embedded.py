"""What one process of all services is told is looked at before any of them is made."""

from __future__ import annotations

from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.core.messages import Lost
from greenroom.embedded import EmbeddedConfig
from greenroom.policies.registry import PLACEMENT_POLICIES
from greenroom.scheduler.effects import Append, Disconnect
from greenroom.worker.runs.run_table import Caller, RunTable
from tests.unit.protocol.pool_bench import DONE, Bench


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("scheduling", "magic", f"known: {', '.join(sorted(PLACEMENT_POLICIES))}"),
        ("max_waiting", 0, "a number from 1"),
        ("max_queue_wait_s", 0.0, "a number of seconds above 0"),
        ("max_queue_wait_s", float("inf"), "a number of seconds above 0"),
        ("max_queue_wait_s", float("nan"), "a number of seconds above 0"),
        ("max_running", 0, "a whole number from 1"),
        ("forecast_every", -1, "0 for none"),
        ("artifact_every_s", -1.0, "0 for never"),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidConfig, match=allowed) as refused:
        EmbeddedConfig(**{field: value})
    assert (refused.value.field, str(refused.value.value)) == (field, str(value))


def test_the_parts_get_what_it_says() -> None:
    config = EmbeddedConfig(scheduling="edf", max_waiting=3, max_queue_wait_s=1.5, max_running=7, forecast_every=9)
    scheduler, worker = config.scheduler(), config.worker("w")
    assert (scheduler.policy, scheduler.pool.max_waiting, scheduler.pool.max_queue_wait_ms) == ("edf", 3, 1500.0)
    assert (worker.instance, worker.max_running, worker.forecasts.every, worker.traces.enabled) == ("w", 7, 9, True)
    assert not EmbeddedConfig(forecast_every=0).worker("w").traces.enabled
    follows = EmbeddedConfig(artifact_every_s=2.5)
    assert (follows.predicts, follows.worker("w").traces.enabled) == (True, True)
    assert (follows.worker("w").artifacts.every_ms, follows.worker("w").forecasts.every) == (2500.0, 0)
    assert not follows.worker("w").traces.tells_tokens
    assert EmbeddedConfig(artifact_every_s=2.5, trace_tokens=True).worker("w").traces.tells_tokens
    assert not EmbeddedConfig(trace_tokens=True).worker("w").traces.tells_tokens, "nothing is traced"
    assert not EmbeddedConfig().predicts
    assert EmbeddedConfig(forecast_every=1, forecast_predictor="emoe-l").worker("w").forecasts.predictor == "emoe-l"


@pytest.mark.parametrize("pause_ms", [3_600.0, 8 * 3_600_000.0])
def test_a_pause_of_the_whole_process_is_no_workers_loss(pause_ms: float) -> None:
    """Scheduler and worker stand still together: the clock of both has jumped when they go on."""
    bench = Bench(EmbeddedConfig().scheduler().pool)
    bench.worker()
    bench.task(deadline_ms=2**40)
    table = RunTable(grace_ms=1_000.0, max_runs=8)
    table.meet(Caller(0, "s", "j", named=True), bench.now)
    table.renew(0, bench.now + bench.pool.config.lease_ms, bench.now)
    for _ in range(3):
        bench.now += pause_ms
        effects = bench.do(bench.pool.tick(bench.now))
        assert not [effect for effect in effects if isinstance(effect, Append) and isinstance(effect.record, Lost)]
        assert not [effect for effect in effects if isinstance(effect, Disconnect)]
        assert table.holds_lease(bench.now), "what is generated is sent at once"
        bench.land()
    bench.do(bench.pool.result("w", "r", bench.last_run().attempt, DONE, bench.now))
    bench.land()
    assert [outcome.reason for outcome in bench.outcomes()] == [DONE.reason]
