"""Policies with what they predict by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from greenroom.core.artifacts.expert_mlp_file import HIDDEN, ExpertMlpFile, MlpForm
from greenroom.core.artifacts.path_file import LAYERS_AHEAD, weights_of
from greenroom.experts.copying.accelerator import Accelerator
from greenroom.moe.routing.expert_mlp import predictors_for
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.foresight.path_weights import PATH
from greenroom.policies.moe_infinity.eamc import EAMC, MATRICES
from greenroom.policies.registry import EXPERT_POLICIES, create_policy, spelt

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


LITERAL = "duoserve:literal=true"
LITERAL_FLOW = "expertflow:literal=true"
EVERY_POLICY = sorted([*EXPERT_POLICIES, LITERAL, LITERAL_FLOW])
"""Each in the form that differs most: DuoServe-MoE's and ExpertFlow's as printed too."""


def mlp_file(
    widths: Sequence[int], top_k: int, *, seed: int = 0, ahead: int = 1, many_hot: bool = False
) -> ExpertMlpFile:
    """A network of random weights, whose answers depend on what it is told and are often sure."""
    random, layers, experts = np.random.default_rng(seed), len(widths), max(widths)
    form = MlpForm(ahead, top_k, many_hot)
    sizes = (form.state_width(layers, experts), *HIDDEN, experts)
    weights = [
        part
        for width, out in pairwise(sizes)
        for part in (random.normal(scale=2 / width**0.5, size=out * width), random.normal(scale=0.1, size=out))
    ]
    return ExpertMlpFile(
        model="",
        experts_per_layer=tuple(widths),
        sequences=1,
        version=seed + 1,
        form=np.array(form, dtype=np.uint16),
        popularity=random.random((layers, experts)).astype(np.float16),
        affinity=random.random((layers - ahead, experts, experts)).astype(np.float16),
        weights=np.concatenate(weights).astype(np.float16),
    )


def prepared_predictors(
    policy: ExpertPolicy, accelerator: Accelerator | None = None, *, seed: int = 0
) -> Sequence[PicksPredictor]:
    """What the engine runs for it beside its own predictors: a network of random weights."""
    catalogue = policy.catalogue
    predictors = predictors_for(policy, accelerator)
    for predictor in predictors:
        file = mlp_file(catalogue.experts_per_layer.tolist(), int(catalogue.top_k.max()), seed=seed)
        predictor.on_artifact_swapped(artifact_of(catalogue, file, "random"))
    return predictors


class RandomPaths(TokenPaths):
    """Foretells anything, the same of a row whenever it is asked for, and is often sure and wrong."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._size = catalogue.size

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        rows = zip(sequences.tolist(), positions.tolist(), tokens.tolist(), strict=True)
        drawn = [np.random.default_rng(row).random(self._size) ** 4 for row in rows]
        return np.array(drawn, dtype=np.float32).reshape(-1, self._size)

    def end(self, sequence: int) -> None:
        """Nothing is remembered."""


def prepared_policy(name: str, catalogue: Catalogue) -> ExpertPolicy:
    """Where it takes an EAMC it has one, so that it prefetches: of random members, each of which uses a third. Where it
    takes paths' weights they are random and large, so that it is often sure.
    """
    name, options = spelt("policy", name)
    policy = create_policy(name, catalogue=catalogue, options=options)
    if PATH in policy.artifacts:
        policy.on_artifact_swapped(Artifact(PATH, "1", path_arrays(catalogue)))
    if EAMC in policy.artifacts:
        random = np.random.default_rng(catalogue.size)
        shape = _MEMBERS, catalogue.size
        matrices = random.integers(1, 9, shape) * (random.random(shape) < 1 / 3)
        policy.on_artifact_swapped(Artifact(EAMC, "1", {MATRICES: matrices.astype(np.float32)}))
    return policy
