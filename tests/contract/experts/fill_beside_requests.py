"""A first request with and without a fill behind it, by a simulated clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from greenroom.experts.engine import ExpertEngine
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.experts.pack.layout import PAGE_BYTES
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedEngine, TimedReplay
from tests.unit.replay.traces import trace_of

DISK_BYTES_PER_S = 1e8


def assert_the_first_request_takes_no_longer(
    tokens: int,
    made: Callable[[Catalogue], ExpertPolicy],
    slots: int,
    resident: Sequence[int],
    fill: Callable[[ExpertEngine], object],
    ended: Callable[[ExpertEngine, bool], object],
    *,
    upload: LinkProfile | None = None,
    host_slots: int = 0,
) -> None:
    """On a disk whose records are read in parts a layer waits for the part that moves, at most, and what has been
    filled meanwhile is not waited for. ``ended`` is told whether the engine that has run its request was filled."""
    trace = trace_of(tokens, layers=6, k=2, experts=8, seed=5)
    setup = TimedReplay(
        trace,
        expert_bytes=16 * PAGE_BYTES,
        compute=ComputeProfile(layer_s=2e-3),
        disk=LinkProfile(DISK_BYTES_PER_S),
        upload=upload,
        reads=ReadSettings(read_bytes=PAGE_BYTES, threads=1, depth=1),
        host_slots=host_slots,
    )
    took, waited, fetched = [], [], 0
    for fills in (False, True):
        with TimedEngine(setup, made(setup.catalogue()), slots, resident) as engine:
            if fills:
                fill(engine.experts)
            result = engine.run(trace.steps())
            ended(engine.experts, fills)
        took.append(result.seconds)
        waited.append(result.stall_seconds)
        fetched = result.on_demand_fetches
    assert took[1] <= took[0] + fetched * PAGE_BYTES / DISK_BYTES_PER_S
    assert tokens == 1 or waited[1] < 0.8 * waited[0]
