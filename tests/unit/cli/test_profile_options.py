"""`greenroom profile` takes a worker's options, less those that it sets itself."""

from __future__ import annotations

import re

from click.testing import CliRunner

from greenroom.cli.profile import profile
from greenroom.policies.registry import BATCH_POLICIES


def test_its_help_speaks_of_no_policy_since_none_can_be_chosen() -> None:
    shown = CliRunner().invoke(profile, ["--help"], catch_exceptions=False).output
    assert "--tokens-per-step" in shown
    assert "--batching" not in shown
    assert "--residual" not in shown, "a profile runs no router ahead"
    assert not set(BATCH_POLICIES) & set(re.findall(r"\w+", shown))
