"""Model profiles in a few words, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from greenroom.core.model_profile import Lengths, MeasuredCosts, ModelProfile, PickWorth, Sensitivity, TaskProfile


def lengths(mean: float) -> Lengths:
    return Lengths(mean=mean, p50=mean, p90=mean, p99=mean, most=mean)


def task_profile(
    popularity: Sequence[Sequence[float]],
    *,
    reads: float = 10.0,
    writes: float = 10.0,
    insensitive: int = 0,
    loss: Sequence[Sequence[float]] | None = None,
) -> TaskProfile:
    """``popularity`` in any unit; the first ``insensitive`` layers are so. ``loss[l][e]``: without that expert."""
    table = np.array(popularity, dtype=np.float64)
    table /= table.sum(axis=1, keepdims=True)
    return TaskProfile(
        prompts=10,
        input_tokens=lengths(reads),
        generated_tokens=lengths(writes),
        popularity=tuple(tuple(row) for row in table.tolist()),
        sensitivity=Sensitivity(threshold=0.85, insensitive_layers=insensitive),
        pick_worth=None if loss is None else PickWorth(loss=tuple(tuple(float(one) for one in row) for row in loss)),
    )


def model_profile(
    tasks: Mapping[str, TaskProfile],
    *,
    top_k: int = 1,
    load_ms: Mapping[int, float] | None = None,
    machine: str = "",
    expert_format: str = "plain",
) -> ModelProfile:
    """``load_ms``: with costs, as they were measured on ``machine`` with experts in ``expert_format``."""
    first = next(iter(tasks.values())).popularity
    costs = (
        None
        if load_ms is None
        else MeasuredCosts(
            token_ms_by_rows={1: 1.0},
            prefill_token_ms=0.1,
            load_ms_by_experts=dict(load_ms),
            machine=machine,
            expert_format=expert_format,
        )
    )
    return ModelProfile(
        format="greenroom-model-profile",
        version=1,
        model="m",
        layers=len(first),
        experts=len(first[0]),
        top_k=top_k,
        tasks=dict(tasks),
        costs=costs,
    )
