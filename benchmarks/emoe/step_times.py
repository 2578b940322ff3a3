"""How long the engine's forwards take: decode steps, and steps with many rows of prompts.

A profile has one cost of a prompt's token, for prompts that come one by one. A step that reads many of them together is
cheaper: it reads an expert once for all of its rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from greenroom.core.model_profile import MeasuredCosts
from greenroom.profiling.measures.costs import measure_costs
from greenroom.profiling.model.profiled_model import Asked, Subject, request_of

PROMPT_ROWS = (64, 128, 256, 448)
"""Rows of prompts in a step, about: whole prompts until there are as many."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds. ``prompt_step_ms``: of a step by its rows, beyond the largest batch that decodes."""

    costs: MeasuredCosts
    prompt_step_ms: Mapping[int, float] = field(default_factory=dict)


def measure_steps(
    subject: Subject, asked: Sequence[Asked], *, rounds: int, steps: int, loads: bool = True, seed: int = 0
) -> Measured:
    """Everything that the simulator needs, measured now. With ``loads`` also what loading experts takes."""
    drawn = Random(seed).sample(list(asked), len(asked))
    costs = measure_costs(subject, drawn, rounds=rounds, steps=steps, seed=seed, done=lambda: None, loads=loads)
    return Measured(costs, measure_prompt_steps(subject, drawn, rounds=rounds))


def mean_of(before: Measured, after: Measured) -> Measured:
    """Of the same sizes, measured before and after a run."""

    def means(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
        return {size: (one[size] + other[size]) / 2 for size in one if size in other}

    a, b = before.costs, after.costs
    costs = MeasuredCosts(
        token_ms_by_rows=means(a.token_ms_by_rows, b.token_ms_by_rows),
        prefill_token_ms=(a.prefill_token_ms + b.prefill_token_ms) / 2,
        load_ms_by_experts=means(a.load_ms_by_experts, b.load_ms_by_experts),
    )
    return Measured(costs, means(before.prompt_step_ms, after.prompt_step_ms))


def measure_prompt_steps(subject: Subject, asked: Sequence[Asked], *, rounds: int) -> dict[int, float]:
    """Medians over ``rounds`` rounds, in which every size has its turn."""
    most = subject.engine.config.tokens_per_step
    crowds = [_crowd(subject, asked, rows) for rows in PROMPT_ROWS if rows <= most]
    sizes = {sum(len(one.prompt_ids) for one in crowd): crowd for crowd in crowds}
    times: dict[int, list[float]] = {rows: [] for rows in sizes if max(PROMPT_ROWS[0] // 2, 1) <= rows <= most}
    for turn in range(rounds + 1):
        for rows, found in times.items():
            took = _one_step(subject, sizes[rows])
            if turn:  # the first has grown what is kept for so many rows
                found.append(took)
    return {rows: round(1e3 * statistics.median(found), 5) for rows, found in times.items()}


def _crowd(subject: Subject, asked: Sequence[Asked], rows: int) -> list[Asked]:
    """Prompts that have at most so many tokens together, and are read in one step."""
    config = subject.engine.config
    found: list[Asked] = []
    left = rows
    for one in asked:
        fits = len(one.prompt_ids) <= min(left, config.prefill_chunk or left)
        if fits and len(found) < config.max_running:
            found.append(one)
            left -= len(one.prompt_ids)
    return found


def _one_step(subject: Subject, crowd: Sequence[Asked]) -> float:
    """Seconds in which these prompts are read and each has its only token."""
    engine = subject.engine
    for place, one in enumerate(crowd):
        engine.add(engine.new_sequence(request_of(one, 1, name=f"crowd-{place}"), lambda _: None))
    started = time.perf_counter()
    subject.step()
    took = time.perf_counter() - started
    assert not engine.busy, "prompts that fit a step took more than one"
    return took
