"""The stage `stall`: what replays come to, and the arms that it compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.expertflow.arms import KNOWN, LITERAL, OURS, REUSE, NotCorrected
from benchmarks.expertflow.replay_jobs import MACHINES
from benchmarks.expertflow.routings import split
from benchmarks.expertflow.stall import ABLATIONS, QUICK, figures, jobs
from greenroom.policies.base.events import LayerRouting, Phase, Reason, SequenceInfo, Step, Tier, VictimRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.expertflow.policy import ExpertFlow
from tests.unit.replay.traces import trace_of


def cell(arm: str, machine: str, stall_ms: float, *, at_once: int = 1, seed: int = 0, ms: float = 10) -> dict[str, Any]:
    return {"arm": arm, "machine": machine, "at_once": at_once, "seed": seed, "stall_ms": stall_ms, "ms": ms}


def test_a_share_is_what_known_paths_take_off_and_the_median_is_of_machines() -> None:
    stalls = {"a": (10.0, 8.0, 0.0), "b": (10.0, 4.0, 0.0), "c": (20.0, 12.0, 4.0)}
    cells = [
        cell(arm.name, machine, stall)
        for machine, own in stalls.items()
        for arm, stall in zip((REUSE, OURS, KNOWN), own, strict=True)
    ]
    found = figures(cells)
    assert found["shares"]["a"][OURS.name]["median"] == pytest.approx(0.2)
    assert found["shares"]["b"][KNOWN.name]["median"] == 1
    assert found["stall_share"]["median"] == pytest.approx(0.5)
    assert found["many_time_ratio"] is None


def test_the_time_ratio_is_of_the_worst_machine_and_the_median_of_seeds() -> None:
    times = {"a": (1.0, 1.1, 1.2), "b": (0.9, 0.9, 3.0)}
    cells = [
        cell(arm, machine, 1, at_once=8, seed=seed, ms=10 * (ratio if arm == OURS.name else 1))
        for machine, own in times.items()
        for seed, ratio in enumerate(own)
        for arm in (REUSE.name, OURS.name)
    ]
    assert figures(cells)["many_time_ratio"] == pytest.approx(1.1)


def test_where_known_paths_save_nothing_there_is_no_share() -> None:
    found = figures([cell(arm.name, "a", 5.0) for arm in (REUSE, OURS, KNOWN)])
    assert found["shares"] == {}
    assert found["stall_share"]["median"] is None


def test_every_seed_has_what_is_compared_and_only_the_first_the_ablations() -> None:
    found = jobs(Path(), QUICK)
    alone = [job for job in found if job.at_once == 1]
    assert {job.machine for job in found} == set(MACHINES)
    for seed in range(QUICK.seeds):
        arms = {job.arm.name for job in alone if job.seed == seed}
        assert {REUSE.name, OURS.name, KNOWN.name} <= arms
        assert (LITERAL.name in arms) == (seed == 0)
    assert len({arm.name for arm in ABLATIONS}) == len(ABLATIONS)


def test_texts_are_numbered_by_the_sequences_that_are_fitted_to() -> None:
    trace = trace_of(4, 4, 4)
    texts = ("only held out", "in both")
    trace = replace(trace, token=np.array([1] * 8 + [0, 1, 0, 1]), token_texts=texts)
    world = split("small", trace)
    assert world.fitted.token_texts == ("in both",)
    assert world.measured.token is not None
    assert world.measured.token.tolist() == [1, 0, 1, 0]


def first_victim(made: type[ExpertFlow]) -> int:
    """Of two experts of the layer that has just been routed and uses neither, the first of which was foretold."""
    catalogue = Catalogue.uniform("small", layers=2, experts=4, top_k=1)
    policy = made(catalogue)
    paths = np.zeros((1, catalogue.size), dtype=np.float32)
    paths[0, 1] = 1.0
    step = Step("small", 0, np.array([0]), np.array([Phase.DECODE], dtype=np.uint8), np.array([7]), paths)
    policy.on_sequence_started(SequenceInfo(0, ""))
    policy.on_step_started(step)
    policy.on_layer_routed(LayerRouting.from_picks(catalogue, step, 0, np.array([[3]])))
    some = np.isin(np.arange(catalogue.size), (1, 2))
    request = VictimRequest(Tier.DEVICE, 1, some, some, Reason.ON_DEMAND, np.array([3]))
    (victim,) = policy.victims(request).tolist()
    return int(victim)


def test_without_correction_what_was_foretold_of_passed_layers_leaves_last() -> None:
    assert first_victim(ExpertFlow) == 1
    assert first_victim(NotCorrected) == 2
