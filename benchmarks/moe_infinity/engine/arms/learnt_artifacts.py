"""What the policies know beforehand, learnt from the routing of prompts that are not asked later."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.inputs.bundled_routing import record_routing
from benchmarks.moe_infinity.engine.prompts import to_learn_from
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.registry import EXPERT_POLICIES
from greenroom.predictor.kinds.config import CAPACITY
from greenroom.predictor.kinds.eamc.members import choose_members
from greenroom.predictor.kinds.reuse.fit import fit
from greenroom.replay.traces.activation_matrices import activation_matrices
from greenroom.replay.traces.routing_trace import RoutingTrace


@dataclass(frozen=True)
class Learnt:
    """``files``: what MoE-Infinity and ``reuse`` predict by. ``facts``: how they came to be."""

    files: tuple[ArtifactFile, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[ArtifactFile, ...]:
        """Those that the policy of this name takes."""
        return tuple(file for file in self.files if file.KIND in EXPERT_POLICIES[policy].artifacts)

    def artifacts(self, policy: str, catalogue: Catalogue) -> tuple[Artifact, ...]:
        return tuple(artifact_of(catalogue, file, "recorded") for file in self.of(policy))

    def write(self, folder: Path, policy: str) -> dict[str, str]:
        """As files, by kind."""
        paths = {file.KIND: folder / f"{file.KIND}.safetensors" for file in self.of(policy)}
        for file in self.of(policy):
            file.write(paths[file.KIND])
        return {kind: str(path) for kind, path in paths.items()}


def learn(prompts: int, capacity: int = CAPACITY) -> Learnt:
    """From so many prompts' routing in the bundled model, which widening leaves as it is."""
    began = time.monotonic()
    trace = record_routing(to_learn_from(prompts))
    recorded = time.monotonic()
    eamc = _eamc(trace, capacity)
    chosen = time.monotonic()
    reuse = fit(trace)
    facts = {
        "sequences": trace.sequences, "members": len(eamc.matrices), "seconds_recording": recorded - began,
        "seconds_choosing": chosen - recorded, "seconds_fitting": time.monotonic() - chosen,
    }  # fmt: skip
    return Learnt((eamc, reuse), facts)


def _eamc(trace: RoutingTrace, capacity: int) -> EamcFile:
    matrices = activation_matrices(trace)
    shape = tuple(trace.experts_per_layer.tolist())
    members = choose_members(shape, matrices, capacity=capacity)
    return EamcFile(
        model=trace.model, experts_per_layer=shape, matrices=matrices[members], sequences=len(matrices)
    )  # fmt: skip
