"""Policies with what they predict by."""

from __future__ import annotations

import numpy as np

from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.registry import create_policy

_MEMBERS = 12


def prepared_policy(name: str, catalogue: Catalogue) -> ExpertPolicy:
    """Where it takes an EAMC it has one, so that it prefetches: of random members, each of which uses a third."""
    policy = create_policy(name, catalogue=catalogue)
    if EAMC in policy.artifacts:
        random = np.random.default_rng(catalogue.size)
        shape = _MEMBERS, catalogue.size
        matrices = random.integers(1, 9, shape) * (random.random(shape) < 1 / 3)
        policy.on_artifact_swapped(Artifact(EAMC, "1", {MATRICES: matrices.astype(np.float32)}))
    return policy
