"""Networks of every kind before anything was learnt."""

from __future__ import annotations

import torch

from greenroom.predictor.kinds.emoe.artifact import Architecture, LearnedArtifact
from greenroom.predictor.kinds.emoe.networks import ExpertNetwork, weights_of
from greenroom.predictor.kinds.emoe.priors import priors_of, tasks_of
from tests.unit.predictor.kinds.emoe.worlds import random_sequences

LAYERS, SLOTS, EXPERTS = 4, 2, 6


def untrained(kind: str, backbone: str = "xlnet", *, astir: bool = True, model: str = "m") -> LearnedArtifact:
    """``astir``: its weights are any, not those of the start, at which it says what the priors say."""
    torch.manual_seed(0)
    sequences = random_sequences(20, layers=LAYERS, slots=SLOTS, experts=EXPERTS)
    tasks = tasks_of(sequences)
    architecture = Architecture(kind, backbone, LAYERS, SLOTS, EXPERTS, len(tasks), 16, 1)
    network = ExpertNetwork(architecture)
    if astir:
        for one in network.parameters():
            torch.nn.init.normal_(one, std=0.2)
    weights = weights_of(network)
    return LearnedArtifact(model, 1, 1000, architecture, priors_of(sequences, tasks), weights, 20)
