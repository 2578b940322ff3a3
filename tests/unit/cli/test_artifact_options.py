from __future__ import annotations

from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS
from greenroom.policies.registry import SPELLINGS


def test_the_options_say_what_the_files_and_the_policies_say() -> None:
    """They are written out so that a --help imports neither."""
    assert {kind: one.made_by for kind, one in POLICY_ARTIFACTS.items()} == {
        kind: ARTIFACT_FILES[kind].MADE_BY for policy in SPELLINGS.values() for kind in policy.artifacts
    }
    for kind, one in POLICY_ARTIFACTS.items():
        takers = {name for name, policy in SPELLINGS.items() if kind in policy.artifacts}
        assert set(one.policies.split(" or ")) == takers
        assert one.refused == any(kind in SPELLINGS[taker].needs for taker in takers)
