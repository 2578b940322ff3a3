"""Policies with what they predict by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from greenroom.core.artifacts.path_file import LAYERS_AHEAD, weights_of
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.duoserve.path_weights import PATH
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.registry import create_policy

_MEMBERS = 12


def path_arrays(catalogue: Catalogue, *, window: int = 2, seed: int = 0) -> Mapping[str, np.ndarray]:
    """Random weights, as the arrays of a PathFile."""
    random, widths = np.random.default_rng(seed), catalogue.experts_per_layer.tolist()
    window = min(window, catalogue.layers)
    return {
        "window": np.array([window], dtype=np.float32),
        "weights": random.normal(scale=4, size=weights_of(widths, window)).astype(np.float16),
        "bias": random.normal(size=(LAYERS_AHEAD, catalogue.size)).astype(np.float32),
        "sequence": np.ones((LAYERS_AHEAD, catalogue.layers), dtype=np.float32),
    }


def prepared_policy(name: str, catalogue: Catalogue) -> ExpertPolicy:
    """Where it takes an EAMC it has one, so that it prefetches: of random members, each of which uses a third. Where it
    takes paths' weights they are random and large, so that it is often sure.
    """
    policy = create_policy(name, catalogue=catalogue)
    if PATH in policy.artifacts:
        policy.on_artifact_swapped(Artifact(PATH, "1", path_arrays(catalogue)))
    if EAMC in policy.artifacts:
        random = np.random.default_rng(catalogue.size)
        shape = _MEMBERS, catalogue.size
        matrices = random.integers(1, 9, shape) * (random.random(shape) < 1 / 3)
        policy.on_artifact_swapped(Artifact(EAMC, "1", {MATRICES: matrices.astype(np.float32)}))
    return policy
