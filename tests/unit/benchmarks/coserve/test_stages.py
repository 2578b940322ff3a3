"""Each replayed stage on few requests: its figures, its table, its picture."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from benchmarks.coserve import burst, executors, line, overhead
from benchmarks.coserve.boards import Task
from benchmarks.coserve.costs import documented
from benchmarks.coserve.machines import HERE
from benchmarks.coserve.settings import EXECUTORS, candidates
from benchmarks.coserve.systems import EVERY_SYSTEM, PULL
from greenroom.profiling.coe.replayed_throughput import replay


@pytest.fixture(autouse=True)
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})


def test_burst(tmp_path: Path) -> None:
    scale = replace(burst.QUICK, seeds=2, tasks=(("A", 3500, False),), machines=(HERE,), sample=60)
    small = replace(scale, tasks=(("A", 150, False),))
    found = burst.run(small)
    assert [cell["system"] for cell in found["cells"]] == [system.name for system in EVERY_SYSTEM]
    told = burst.table(found)
    assert all(system.name in told for system in EVERY_SYSTEM)
    burst.draw(found, tmp_path / "burst.png")
    assert (tmp_path / "burst.png").stat().st_size > 1000
    own = burst.figures(found["cells"], HERE.name, "A, 150")
    by_name = {cell["system"]: cell for cell in found["cells"]}
    values = [by_name[name]["values"]["per_s"] for name in ("CoServe", "Samba-CoE")]
    assert own["coserve_over_samba"] == pytest.approx(
        ((values[0][0] / values[1][0]) * (values[0][1] / values[1][1])) ** 0.5
    )
    assert own["best_simple"] in {"one memory, LRU", "one memory, LRU, assigned"} or "batches" in own["best_simple"]
    assert found["pull_over_coserve"] is None, "the aims are of 3,500 requests"


@pytest.mark.parametrize(
    ("limit", "executors", "seeds"),
    [
        (line.Limit(1, 1, 0.5), (2,), 1),
        pytest.param(line.Limit(5, 2, 0.5), EXECUTORS, 2, marks=pytest.mark.full),
    ],
    ids=["1 s", "5 s"],
)
def test_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: line.Limit, executors: tuple[int, ...], seeds: int
) -> None:
    """``executors``: how many may be the best."""
    monkeypatch.setattr(line, "candidates", partial(candidates, executors=executors))
    scale = replace(line.QUICK, seeds=seeds, places=(line.Place(HERE, ((limit, None),)),))
    found = line.run(scale)
    (one,) = found["places"]
    assert found["line_rate_over_coserve"] == one["rate_over_coserve"]["mean"] > 0
    assert "highest rate" in line.table(found)
    line.draw(found, tmp_path / "line.png")
    assert (tmp_path / "line.png").stat().st_size > 1000


def test_executors(tmp_path: Path) -> None:
    found = executors.run(replace(executors.QUICK, requests=120, points=3, sample=40))
    assert {cell["executors"] for cell in found["cells"]} == {1, 2, 3, 4}
    assert 0 < found["window_share"] <= 1
    assert all(cell["residents"] in cell["sweep"] for cell in found["cells"])
    assert "of the best of all" in executors.table(found)
    executors.draw(found, tmp_path / "executors.png")
    assert (tmp_path / "executors.png").stat().st_size > 1000


def test_overhead(tmp_path: Path) -> None:
    found = overhead.run(replace(overhead.QUICK, requests=120, sample=40))
    for cell in found["cells"]:
        assert 0 < cell["management_share"]["mean"] < cell["overhead_share"]["mean"] < 1
    assert "decisions %" in overhead.table(found)
    overhead.draw(found, tmp_path / "overhead.png")
    assert (tmp_path / "overhead.png").stat().st_size > 1000


def test_what_is_clocked_decides_as_what_is_not() -> None:
    board = Task("A", 150, 2).on(documented())
    memory = sum(board.bytes_of) // 10
    clocked = overhead.Clocked(PULL)
    assert replay(board, clocked, 2, memory, memory // 2) == replay(board, PULL, 2, memory, memory // 2)
    assert clocked.spent.deciding > clocked.spent.managing > 0
