"""The decisions: which expert is where, which rows run next, which worker gets a request.

Pure and synchronous, on numpy alone, without a clock: the same objects run in the worker, in a unit test and in a
replay of recorded routing. ``greenroom.policies.base.expert_policy`` says how an engine drives an ExpertPolicy.
"""

from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch, Target
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.placement.placement_policy import PlacementPolicy
from greenroom.policies.registry import (
    BATCH_POLICIES,
    EXPERT_POLICIES,
    PLACEMENT_POLICIES,
    create_batch_policy,
    create_placement_policy,
    create_policy,
)

__all__ = [
    "BATCH_POLICIES",
    "EXPERT_POLICIES",
    "PLACEMENT_POLICIES",
    "BatchPolicy",
    "Catalogue",
    "ExpertPolicy",
    "PlacementPolicy",
    "Prefetch",
    "Target",
    "create_batch_policy",
    "create_placement_policy",
    "create_policy",
]
