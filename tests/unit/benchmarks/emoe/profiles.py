"""A small profile with costs that can be reckoned with by hand."""

from __future__ import annotations

from greenroom.core.model_profile import Lengths, MeasuredCosts, ModelProfile, Sensitivity, TaskProfile

COSTS = MeasuredCosts(token_ms_by_rows={1: 10.0, 2: 8.0, 4: 6.0}, prefill_token_ms=5.0, load_ms_by_experts={1: 7.0})
"""A step of 1, 2, 3, 4 rows takes 10, 16, 20, 24 ms, each row beyond 5 ms more."""


def lengths(tokens: float) -> Lengths:
    return Lengths(mean=tokens, p50=tokens, p90=tokens, p99=tokens, most=tokens, cdf=((tokens, 1.0),))


def profile(*, layers: int = 2, experts: int = 4, costs: MeasuredCosts | None = COSTS) -> ModelProfile:
    """Tasks ``short`` (3 tokens in, 2 out; experts 0 and 1) and ``long`` (4 in, 8 out; 2 and 3; insensitive at layer
    0)."""
    return ModelProfile(
        format="greenroom-model-profile",
        version=1,
        model="small",
        layers=layers,
        experts=experts,
        top_k=1,
        tasks={
            "short": TaskProfile(
                prompts=10,
                input_tokens=lengths(3),
                generated_tokens=lengths(2),
                popularity=((0.6, 0.4, 0.0, 0.0),) * layers,
            ),
            "long": TaskProfile(
                prompts=10,
                input_tokens=lengths(4),
                generated_tokens=lengths(8),
                popularity=((0.0, 0.0, 0.6, 0.4),) * layers,
                sensitivity=Sensitivity(threshold=0.85, insensitive_layers=1),
            ),
        },
        costs=costs,
    )
