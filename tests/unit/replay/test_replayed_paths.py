"""A replay drives what foretells paths as a batch loop does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.registry import create_policy
from greenroom.replay.hit_rates import replay
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.traces.routing_trace import RoutingTrace

PROMPT, ROWS = 300, 304  # a prompt of more than one chunk, and four tokens


def traced() -> RoutingTrace:
    random = np.random.default_rng(0)
    phase = np.full(2 * ROWS, Phase.DECODE, dtype=np.uint8)
    for start in (0, ROWS):
        phase[start : start + PROMPT] = Phase.PREFILL
    return RoutingTrace(
        np.argsort(random.random((2 * ROWS, 2, 4)), axis=2)[:, :, :2].astype(np.uint8),
        np.array([0, ROWS, 2 * ROWS]),
        num_experts=4,
        phase=phase,
        token=np.arange(2 * ROWS),
    )


class Notes(TokenPaths):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.begun: dict[int, list[int]] = {}

    def begin(self, sequence: int, prompt: Ids) -> None:
        assert sequence not in self.begun
        self.begun[sequence] = prompt.tolist()

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        assert set(sequences.tolist()) <= self.begun.keys()
        self.calls.append(("asked", sequences.tolist(), positions.tolist(), tokens.tolist()))
        return np.full((len(tokens), 8), 0.5, dtype=np.float32)

    def picked(self, sequences: Ids, positions: Ids, picks: np.ndarray) -> None:
        self.calls.append(("ran", sequences.tolist(), positions.tolist()))

    def end(self, sequence: int) -> None:
        self.calls.append(("end", sequence))


@pytest.mark.parametrize("timed", [True, False])
def test_prompts_are_told_whole_at_the_start_and_picks_once_their_rows_have_run(timed: bool) -> None:
    trace, source = traced(), Notes()
    steps = trace.steps(concurrent=1)
    if timed:
        setup = TimedReplay(trace, 4096, LinkProfile(1e9), ComputeProfile(), paths=lambda policy, trace: source)
        setup.run(create_policy("expertflow", catalogue=setup.catalogue()), steps, 4)
    else:
        replay(create_policy("expertflow", catalogue=trace.catalogue()), steps, 4, paths=source)

    assert source.begun == {0: list(range(PROMPT)), 1: list(range(ROWS, ROWS + PROMPT))}
    asked = [call[1:3] for call in source.calls if call[0] == "asked"]
    assert asked == [call[1:] for call in source.calls if call[0] == "ran"]
    assert [place for _, places in asked for place in places] == [*range(ROWS), *range(ROWS)]
    assert [call for call in source.calls if call[0] == "end"] == [("end", 0), ("end", 1)]
    assert source.calls[-2][0] == "ran", "its last rows' picks come before its end"
