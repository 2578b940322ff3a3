"""Synthetic models small enough for a stage to run in a moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.moe_infinity.simulated_models import SWITCH_LARGE, Model


def tiny(**changes: Any) -> Model:
    shape = replace(SWITCH_LARGE.shape, name="tiny", layers=4, experts=6, decoder_start=2)
    mix = replace(SWITCH_LARGE.mix, tasks=3, prompt_tokens=4, output_tokens=4)
    return replace(SWITCH_LARGE, shape=shape, mix=mix, slots=12, **changes)


def serially(work: Callable[..., Any], items: Sequence[Any], jobs: int, finished: Callable[[], object]) -> list[Any]:
    found = []
    for item in items:
        found.append(work(item, lambda: None))
        finished()
    return found
