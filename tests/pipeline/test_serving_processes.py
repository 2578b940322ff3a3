"""The stage `serving` in processes of its own, as its full form runs.

`make test` has the processes themselves: tests/unit/replay/test_processes.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.duoserve.serving import stage
from benchmarks.duoserve.serving.arms import BASE, PHASES
from benchmarks.duoserve.serving.machines import GPU
from benchmarks.duoserve.serving.requests import Routes
from benchmarks.duoserve.serving.simulated_server import Server
from tests.unit.replay.traces import trace_of


@pytest.mark.full
def test_several_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GREENROOM_DATA", raising=False)
    trace = trace_of(30, 40, 20, layers=2, k=2, experts=12)
    server = Server(trace, Routes(trace, ["a", "b", "a"]), (), policy="next-use")
    scale = stage.Scale(seeds=1, requests=2, saturating=2, loads=(0.5,), arms=(BASE, PHASES), shorter=100.0)
    one, two = (stage.on_machine(replace(scale, processes=count), server, GPU, "made up") for count in (1, 2))
    assert one == two
