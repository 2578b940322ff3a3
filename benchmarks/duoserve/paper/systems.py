"""The systems that are compared, each an expert engine on one loaded model."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple

from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.children.process_memory import at_rest, peak_bytes
from benchmarks.harness.inputs.shared_model import Ask, SharedModel
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.expert_keys import Catalogue

LITERAL, ACC, MOESYS = "DuoServe-MoE as printed", "ACC: on demand", "MoESys: whole layers"
DUOSERVE_K, DUOSERVE_LAYER = "duoserve, top-k slots", "duoserve, a layer's slots"
RESIDENT: Final = "all experts resident"


class System(NamedTuple):
    """``slots``: the router's top-k, as many as a layer has experts, or all."""

    kind: Kind
    slots: str

    def slots_of(self, catalogue: Catalogue) -> int:
        choices = {"k": catalogue.top_k.max(), "layer": catalogue.experts_per_layer.max(), "all": catalogue.size}
        return int(choices[self.slots])


SYSTEMS: Final = (
    System(Kind(LITERAL, "duoserve", {"literal": True}), "k"),
    System(Kind(ACC, "lru"), "k"),
    System(Kind(MOESYS, "next-layer"), "layer"),
    System(Kind(DUOSERVE_K, "duoserve"), "k"),
    System(Kind(DUOSERVE_LAYER, "duoserve"), "layer"),
    System(Kind(RESIDENT, "lru"), "all"),
)
"""As the paper rebuilt its baselines in vLLM, here all are policies of one engine: nothing else differs."""


def opened(system: System, shared: SharedModel, files: Sequence[ArtifactFile]) -> EngineArm:
    catalogue = shared.catalogue
    share = (system.slots_of(catalogue) + 0.5) / catalogue.size  # an arm rounds down
    arm = EngineArm(system.kind, shared, min(1.0, share))
    for file in files:
        if file.KIND in arm.policy.artifacts:
            arm.experts.swapped(arm.experts.prepare(artifact_of(catalogue, file, "fitted")))
    return arm


@contextmanager
def all_opened(shared: SharedModel, files: Sequence[ArtifactFile]) -> Iterator[Mapping[str, EngineArm]]:
    """By name."""
    with ExitStack() as stack:
        stack.callback(shared.detach)
        arms = {}
        for system in SYSTEMS:
            arms[system.kind.name] = arm = opened(system, shared, files)
            stack.callback(arm.close)
        yield arms


def peaks(shared: SharedModel, files: Sequence[ArtifactFile], asks: Sequence[Ask]) -> dict[str, int]:
    """By system: how far this process's resident set rises above what it is without experts, while that system alone
    answers the prompts. Its arena, its predictor and the step's own tensors are in it; code and dense weights are not.
    """
    found = {}
    for system in (SYSTEMS[1], *SYSTEMS):  # the first turn of all allocates what the model itself needs
        gc.collect()
        before = at_rest()
        arm = opened(system, shared, files)
        try:
            arm.run(asks, 1)
            found[system.kind.name] = peak_bytes() - before
        finally:
            with suppress(RuntimeError):
                shared.detach()
            arm.close()
            del arm
    gc.collect()
    return found
