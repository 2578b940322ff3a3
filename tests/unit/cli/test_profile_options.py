"""`greenroom profile` takes a worker's options, less those that it sets itself."""

from __future__ import annotations

import re

from click.testing import CliRunner

from greenroom.cli.profile import _worker_config, profile
from greenroom.policies.registry import BATCH_POLICIES


def test_its_help_speaks_of_no_policy_since_none_can_be_chosen() -> None:
    shown = CliRunner().invoke(profile, ["--help"], catch_exceptions=False).output
    assert "--tokens-per-step" in shown
    assert "--batching" not in shown
    assert "--residual" not in shown, "a profile runs no router ahead"
    assert not set(BATCH_POLICIES) & set(re.findall(r"\w+", shown))


def test_memory_is_planned_for_the_policy_that_measures() -> None:
    """It holds all outputs of a step, as no policy that streams does."""
    assert _worker_config(None, {}).policy == "next-use"
