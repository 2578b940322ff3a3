"""What nobody can beat, and the best of several settings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.coserve.boards import Task, memory_of
from benchmarks.coserve.bounds import bound_of
from benchmarks.coserve.costs import documented
from benchmarks.coserve.machines import LOADING_SHARE, MACHINES, loading_share, on_disk, torch_load_ms
from benchmarks.coserve.settings import Setting, best_setting, candidates, run_with
from benchmarks.coserve.systems import EVERY_SYSTEM
from greenroom.core.coe_profile import ArchitectureCosts
from greenroom.profiling.coe.replayed_throughput import Board
from tests.coe_profiles import costs

SIZE = 10


def board(paths: Sequence[tuple[int, ...]], load_ms: float = 100.0) -> Board:
    made, cost = Task("A", 1, 0).graph, costs(1.0, 0.0)
    own = ArchitectureCosts(load_ms=load_ms, bytes_by_batch=cost.bytes_by_batch, by_executors=cost.by_executors)
    return Board(made, [SIZE] * len(made), [own] * len(made), np.ones(len(made)), paths)


def test_what_has_to_be_read_is_what_does_not_fit() -> None:
    found = bound_of(board([(0,), (1,), (1,), (2,), (3,)]), 2 * SIZE)
    assert found.switches == 2
    assert found.link_ms == pytest.approx(200.0)
    assert found.limits == "link"
    assert found.least_ms == found.link_ms


def test_work_is_done_in_the_best_batches_that_there_can_be() -> None:
    own = board([(0,)] * 9 + [(1,)] * 2, load_ms=0.001)
    found = bound_of(own, 100 * SIZE)
    assert (found.switches, found.link_ms) == (0, 0.0)
    assert found.work_ms == pytest.approx(9 * (3 + 8) / 8 + (3 + 2))  # and as much with two, each half as fast
    assert found.limits == "work"


@pytest.mark.parametrize("system", EVERY_SYSTEM, ids=lambda system: system.name)
def test_no_system_beats_the_bound(system: object) -> None:
    task = Task("A", 120, 1)
    own = task.on(documented())
    memory = memory_of(own)
    setting = candidates(own, memory, (getattr(system, "executors", None) or 2,))[0]
    served = run_with(own, getattr(system, "scheme"), setting, memory)  # noqa: B009
    assert served is not None
    found = bound_of(own, memory)
    assert served.total_ms >= found.least_ms
    assert served.loads >= found.switches
    assert sum(served.loads_by_memory) <= served.loads


def test_the_fewest_executors_and_the_most_experts_of_what_is_as_good() -> None:
    settings = [Setting(count, size) for count in (1, 2, 3) for size in (100, 50)]
    speed = {1: 10.0, 2: 20.0, 3: 20.1}
    assert best_setting(settings, lambda one: speed[one.executors]) == Setting(2, 100)
    assert best_setting(settings, lambda one: speed[one.executors] - one.expert_bytes / 10) == Setting(2, 50)


def test_on_the_papers_disks_loading_is_nine_tenths_of_a_cold_request() -> None:
    own = on_disk(documented().models["resnet-101"], 530e6)
    assert own.batches.load_ms == pytest.approx(170 * 2**20 / 530e3)
    assert loading_share(own) == pytest.approx(LOADING_SHARE)
    times = own.batches.by_executors[2]
    assert times.ms_of(4) / times.ms_of(1) == pytest.approx(18 / 6)


def test_what_from_pretrained_takes_keeps_its_proportion_to_our_loading() -> None:
    made, task = documented(), Task("A", 1, 0)
    for machine in MACHINES[:3]:
        own = machine.board(task, made)
        theirs = torch_load_ms(task, made, machine, own)
        model = made.models[machine.every or "type"]
        assert theirs[0] / own.costs[0].load_ms == pytest.approx(model.torch_ms / model.batches.load_ms)
