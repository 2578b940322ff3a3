"""From what experts say to what an outcome carries."""

from __future__ import annotations

from greenroom.coe.serving.outcomes import Outcome
from greenroom.core.inference_outputs import Box, InferenceOutputs


def outputs_of(outcome: Outcome) -> InferenceOutputs:
    """Of a request without an error: the path, and what its last expert says."""
    last = outcome.stages[-1].result
    return InferenceOutputs(
        path=outcome.path,
        label=last.label,
        score=last.score,
        scores=tuple(sorted(last.scores.items(), key=lambda one: -one[1])),
        boxes=tuple(Box(box.label, box.score, box.left, box.top, box.right, box.bottom) for box in last.boxes),
        embedding=b"" if last.embedding is None else last.embedding.astype("<f4").tobytes(),
    )
