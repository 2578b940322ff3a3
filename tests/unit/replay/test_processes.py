"""Work in processes of their own: its order, its errors and its ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing import active_children
from pathlib import Path

import psutil
import pytest

from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.sweeps.processes import ProcessLost, in_processes
from greenroom.replay.sweeps.sweep import PolicySpec, Sweep
from tests.unit.replay.errands import die, forever_but_the_first, refuse
from tests.unit.replay.traces import trace_of

TRACE = trace_of(40, 30, 20, layers=3, k=2, experts=8)
PATIENCE_S = 60.0


def sweep_of(slots: tuple[int, ...], timed: TimedReplay | None = None) -> Sweep:
    policies = tuple(map(PolicySpec.parse, ("next-use", "decayed:decay=0.9", "belady:ahead=2")))
    return Sweep(TRACE, policies, slots, (1, 3), timed=timed)


@pytest.mark.parametrize("timed", [None, TimedReplay(TRACE, 4096, LinkProfile(4096), ComputeProfile(expert_s=0.5))])
def test_cells_are_the_same_in_the_same_order_however_many_processes(timed: TimedReplay | None) -> None:
    sweep = sweep_of((8, 12), timed)
    finished: list[int] = []

    cells = sweep.cells(jobs=2, finished=lambda: finished.append(threading.get_ident()))

    assert cells == sweep.cells()
    assert finished == [threading.get_ident()] * len(sweep.places)
    assert not active_children()


def test_an_error_of_a_cell_is_the_error_of_the_sweep() -> None:
    with pytest.raises(BudgetTooSmall, match="picks 2, experts of 2 bytes"):
        sweep_of((1, 8)).cells(jobs=2)
    assert not active_children()


def test_an_error_arrives_as_it_was() -> None:
    with pytest.raises(InvalidConfig, match="item: 5 is not allowed; another") as caught:
        in_processes(refuse, [5, 5], 2, lambda: None)
    assert (caught.value.field, caught.value.value) == ("item", 5)


def test_a_process_that_dies_is_not_waited_for() -> None:
    with pytest.raises(ProcessLost, match="fewer --jobs"):
        in_processes(die, [1, 2, 3], 2, lambda: None)
    assert not active_children()


def test_what_is_raised_meanwhile_ends_work_that_is_under_way() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_processes(forever_but_the_first, [0, 1, 2, 3], 2, interrupted)
    assert not active_children()


SCRIPT = """
import signal
from greenroom.replay.sweeps.processes import in_processes
from tests.unit.replay.errands import forever_but_the_first
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored, as under nohup
    in_processes(forever_but_the_first, [0, 1, 2], 2, lambda: print("under way", flush=True))
"""


@pytest.mark.parametrize(("sent", "to_all", "status"), [(signal.SIGINT, True, -2), (signal.SIGKILL, False, -9)])
def test_no_process_outlives_the_one_that_started_it(
    sent: signal.Signals, to_all: bool, status: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "under way\n"
        below = psutil.Process(started.pid).children(recursive=True)
        assert len(below) >= 2

        # As a terminal does for Ctrl-C: the whole group gets it.
        (os.killpg if to_all else os.kill)(started.pid, sent)

        _, errors = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == status
        assert errors.count("Traceback") == (1 if to_all else 0), errors
        _, alive = psutil.wait_procs(below, timeout=PATIENCE_S)
        assert not alive
    finally:
        started.kill()
        started.wait(PATIENCE_S)
