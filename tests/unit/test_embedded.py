"""What one process of all services is told is looked at before any of them is made."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.embedded import EmbeddedConfig
from greenroom.policies.registry import PLACEMENT_POLICIES


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
    assert not EmbeddedConfig().predicts
    assert EmbeddedConfig(forecast_every=1, forecast_predictor="emoe-l").worker("w").forecasts.predictor == "emoe-l"


def test_torch_is_not_waited_for() -> None:
    code = "import sys, greenroom.embedded; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
