"""What the engine's steps take, measured now on the model that real servers run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from msgspec import structs

from greenroom.core.model_profile import MeasuredCosts
from greenroom.profiling.measures.costs import measure_costs
from greenroom.profiling.model.profiled_model import Asked, Subject


def measure_steps(
    subject: Subject, asked: Sequence[Asked], *, rounds: int, steps: int, loads: bool = True, seed: int = 0
) -> MeasuredCosts:
    """Everything that the simulator needs. With ``loads`` also what loading experts takes."""
    drawn = Random(seed).sample(list(asked), len(asked))
    return measure_costs(subject, drawn, rounds=rounds, steps=steps, seed=seed, done=lambda: None, loads=loads)


def mean_of(before: MeasuredCosts, after: MeasuredCosts) -> MeasuredCosts:
    """Of the same sizes, measured before and after a run."""

    def means(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
        return {size: (one[size] + other[size]) / 2 for size in one if size in other}

    return structs.replace(
        before,
        token_ms_by_rows=means(before.token_ms_by_rows, after.token_ms_by_rows),
        prefill_token_ms=(before.prefill_token_ms + after.prefill_token_ms) / 2,
        prompt_step_ms=means(before.prompt_step_ms, after.prompt_step_ms),
        beside_prompts=_mean(before.beside_prompts, after.beside_prompts),
        load_ms_by_experts=means(before.load_ms_by_experts, after.load_ms_by_experts),
    )


def _mean(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else (one + other) / 2
