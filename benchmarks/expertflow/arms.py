"""The policies that replays compare, each with what foretells for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

import numpy as np

from benchmarks.expertflow.routings import Files
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import LayerRouting, Step, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.expertflow.policy import ExpertFlow
from greenroom.policies.expertflow.token_tables import TokenTables
from greenroom.policies.registry import create_policy, spelt
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.simulated_predictions import KnownPaths
from greenroom.replay.simulation.timed_replay import MakesPaths, no_paths

Foretold = Literal["nothing", "tokens", "tokens and past", "known"]


@dataclass(frozen=True, slots=True)
class Arm:
    """``policy``: as users write it. ``foretold``: what is said of each row before its forward. ``router``: whether
    routers run ahead. ``corrected`` False: ``NotCorrected`` in place of `expertflow`."""

    name: str
    policy: str
    foretold: Foretold = "nothing"
    router: bool = True
    corrected: bool = True

    def made(self, catalogue: Catalogue, files: Files) -> ExpertPolicy:
        """Anew, with all fitted files that it takes."""
        policy: ExpertPolicy
        if self.corrected:
            name, options = spelt("policy", self.policy)
            policy = create_policy(name, catalogue=catalogue, options=options)
        else:
            policy = NotCorrected(catalogue)
        for file in files.each:
            if file.KIND in policy.artifacts:
                policy.on_artifact_swapped(artifact_of(catalogue, file, file.KIND))
        return policy

    def paths(self, files: Files) -> MakesPaths:
        """What foretells for it in a replay."""
        if self.foretold == "nothing":
            return no_paths
        if self.foretold == "known":
            return KnownPaths
        return partial(_tables, files, self.foretold == "tokens and past")


def _tables(files: Files, past: bool, policy: ExpertPolicy, trace: RoutingTrace) -> TokenPaths:
    return TokenTables(files.paths, policy.catalogue, policy.past_logits if past else None)


class NotCorrected(ExpertFlow):
    """`expertflow` without correction: what was foretold of a step stays until the step ends, though its layer has
    shown that it is not used."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._spared: Mask = np.zeros(catalogue.size, dtype=np.bool_)
        self._running = -1

    def on_step_started(self, step: Step) -> None:
        self._running = -1
        self._spared = np.zeros(self.catalogue.size, dtype=np.bool_)
        if step.row_paths is not None:
            self._spared = np.asarray((step.row_paths >= self._least).any(axis=0))
        super().on_step_started(step)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._running = routing.layer
        super().on_layer_routed(routing)

    def victims(self, request: VictimRequest) -> Keys:
        if request.tier is not Tier.DEVICE:
            return super().victims(request)
        passed = self._spared & (self.catalogue.layer_of <= self._running)
        spared = super().victims(_without(request, passed))
        if len(spared):
            return spared
        worth, tie = self.retention.worth(request.tier)
        return lowest(self.catalogue, request, worth, tie)


def _without(request: VictimRequest, spared: Mask) -> VictimRequest:
    return replace(request, evictable=request.evictable & ~spared)


REUSE: Final = Arm("reuse", "reuse")
OURS: Final = Arm("expertflow", "expertflow", "tokens and past")
KNOWN: Final = Arm("expertflow, paths known", "expertflow", "known")
LITERAL: Final = Arm("literal", "expertflow:literal=true", "tokens and past")
LITERAL_KNOWN: Final = Arm("literal, paths known", "expertflow:literal=true", "known")
