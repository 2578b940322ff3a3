"""What the policies know beforehand, learnt from the routing of prompts that are not asked later."""

from __future__ import annotations

import time

from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.inputs.bundled_routing import record_routing
from benchmarks.harness.inputs.task_prompts import to_learn_from
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.predictor.kinds.config import CAPACITY
from greenroom.predictor.kinds.eamc.members import choose_members
from greenroom.predictor.kinds.reuse.fit import fit
from greenroom.replay.traces.activation_matrices import activation_matrices
from greenroom.replay.traces.routing_trace import RoutingTrace


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
