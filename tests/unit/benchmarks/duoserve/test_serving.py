"""The stage `serving`: its requests, its simulated server, its figures."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.duoserve import loads
from benchmarks.duoserve.serving import stage
from benchmarks.duoserve.serving.arms import ARMS, BASE, PHASES, Arm, rows_and_slots
from benchmarks.duoserve.serving.figures import Slo, over, summary
from benchmarks.duoserve.serving.machines import EXPERT_BYTES, GPU, Machine
from benchmarks.duoserve.serving.open_loop import Answered
from benchmarks.duoserve.serving.plots import draw
from benchmarks.duoserve.serving.requests import Request, Routes, requests_of, subjects_of
from benchmarks.duoserve.serving.simulated_server import KV_TOKENS, Ran, Server
from benchmarks.duoserve.serving.tables import short, table
from benchmarks.harness.inputs.split_routing import world_of
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile
from tests.unit.replay.traces import trace_of

TICKING = Machine("ticking", LinkProfile(1e18), ComputeProfile(step_s=1.0))
"""Each step takes a second, whatever is in it."""


def server(**options: str) -> Server:
    trace = trace_of(30, 40, 20, layers=2, k=2, experts=12)
    return Server(trace, Routes(trace, ["a", "b", "a"]), (), policy="next-use", **options)


def ran(requests: list[Request], arm: Arm = BASE, machine: Machine = TICKING) -> Ran:
    return server().run(machine, arm, requests, 0)


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recorded arrivals."""
    monkeypatch.delenv("GREENROOM_DATA", raising=False)


@pytest.mark.usefixtures("drawn")
def test_drawn_requests_have_the_recorded_mean_and_come_once_a_second() -> None:
    found = requests_of(4000, 3)
    assert found == requests_of(4000, 3) != requests_of(4000, 4)
    assert np.mean([one.prompt for one in found]) == pytest.approx(1155, rel=0.1)
    assert np.mean([one.answer for one in found]) == pytest.approx(211, rel=0.1)
    assert found[0].at_s == 0.0
    assert found[-1].at_s == pytest.approx(3999)
    assert all(before.at_s <= after.at_s for before, after in pairwise(found))


@pytest.mark.usefixtures("drawn")
def test_shorter_requests_are_the_same_ones() -> None:
    whole, tenth = requests_of(50, 0), requests_of(50, 0, shorter=10.0)
    assert [one.at_s for one in whole] == [one.at_s for one in tenth]
    assert [max(1, round(one.prompt / 10)) for one in whole] == [one.prompt for one in tenth]
    assert whole[7].at_rate(4.0).at_s == whole[7].at_s / 4


def test_recorded_requests_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GREENROOM_DATA", str(tmp_path))
    folder = tmp_path / "arrivals"
    folder.mkdir()
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{at * at},{100 + at},{1 + at}" for at in range(9))]
    (folder / "azure-llm-2023-conversation.csv").write_text("\n".join(lines))
    found = requests_of(4, 0)
    assert [one.prompt - one.answer for one in found] == [99] * 4
    first = found[0].answer - 1
    gaps = [one.at_s / found[-1].at_s for one in found]
    squares = [(first + n) ** 2 - first**2 for n in range(4)]
    assert gaps == pytest.approx([square / squares[-1] for square in squares])
    assert found[-1].at_s == pytest.approx(3)


def test_a_request_goes_through_its_subject_and_then_the_next_ones() -> None:
    trace = trace_of(3, 4, 5, 0, layers=1, k=1, experts=4)
    trace.experts[:, 0, 0] = np.repeat([0, 1, 2], [3, 4, 5])
    routes = Routes(trace, ["b", "a", "b", "c"])
    for seed in range(20):
        rows = routes.rows(12, Random(seed))[:, 0, 0].tolist()
        assert sorted(rows) == [0] * 3 + [1] * 4 + [2] * 5
        assert "".join(map(str, rows)).strip("1") in ("00022222", "22222000")  # the subject b is in one piece
    assert len(routes.rows(100, Random(0))) == 100
    with pytest.raises(ValueError, match="no recorded sequence"):
        Routes(trace_of(0), ["a"])


def test_a_subject_is_the_recorded_task_or_that_of_the_descriptions_beside(tmp_path: Path) -> None:
    trace = trace_of(2, 2, 2)
    path = tmp_path / "some.npz"
    assert subjects_of(trace, path) == ["", "", ""]
    (tmp_path / "some.meta.jsonl").write_text("\n".join(json.dumps({"category": name}) for name in "xy"))
    assert subjects_of(trace, path) == ["x", "y", ""]


# -- the simulated server ----------------------------------------------------------------------------------------------


def test_a_token_comes_with_each_step_and_who_came_in_a_step_joins_after_it() -> None:
    first, second, third = ran([Request(0.0, 2, 3), Request(0.5, 2, 2), Request(10.0, 1, 1)]).answered
    assert first.tokens_s == pytest.approx([1, 2, 3])
    assert second.tokens_s == pytest.approx([2, 3])
    assert second.ttft_s == pytest.approx(1.5)
    assert second.tpot_s == pytest.approx(1.0)
    assert third.tokens_s == pytest.approx([11])
    assert third.tpot_s is None


def test_prompts_run_as_the_batch_policy_has_it() -> None:
    asked = [Request(0.0, 600, 2)]
    assert [ran(asked, arm).prompt_steps for arm in (BASE, Arm("phases", "phases"))] == [3, 2]
    assert ran(asked).answered[0].ttft_s == pytest.approx(3)


def test_who_does_not_fit_into_kv_waits_for_an_end() -> None:
    large = KV_TOKENS // 2 + 1
    first, second = ran([Request(0.0, large, 2), Request(0.0, large, 2)], Arm("fcfs", "fcfs", 512, None)).answered
    assert second.tokens_s[0] > first.tokens_s[-1]


def test_missing_experts_take_the_links_time_and_policies_are_told() -> None:
    """24 experts of which 8 are resident; a prompt of many rows uses all."""
    found = ran([Request(0.0, 400, 1)], BASE, Machine("slow", LinkProfile(EXPERT_BYTES), ComputeProfile(row_s=1e-3)))
    assert found.slots == 8
    assert found.moved_bytes >= 16 * EXPERT_BYTES
    assert found.answered[0].ttft_s == pytest.approx(found.moved_bytes / EXPERT_BYTES, rel=0.2)
    assert found.prompt_steps == 2
    # 16 experts are missing, 1 s each; a row computes in two layers and with two experts each.
    assert found.balanced_rows == pytest.approx(16 / 4e-3, rel=0.05)


def test_where_all_fit_nothing_moves_whatever_the_rows() -> None:
    machine = Machine("slow", LinkProfile(EXPERT_BYTES), ComputeProfile(row_s=1e-3)).with_all()
    for arm in (BASE, PHASES):
        found = ran([Request(0.0, 1400, 1)], arm, machine)
        assert (found.slots, found.moved_bytes, found.balanced_rows) == (24, 0, None)
        assert found.answered[0].ttft_s == pytest.approx(1400 * 4e-3)


def test_more_rows_cost_experts_as_the_memory_plan_has_it() -> None:
    by_name = {arm.name: rows_and_slots(arm, 256, 5000) for arm in ARMS}
    assert by_name[BASE.name] == (512, 256)
    rows, slots = by_name[PHASES.name]
    assert rows > 512
    assert 256 * 7 / 8 <= slots < 256
    assert by_name["phases, 4096 rows"][1] < slots
    assert rows_and_slots(PHASES, 256, 300) == (512, 256)


def test_the_gpu_is_that_of_the_stage_loads() -> None:
    assert GPU.link == loads.LINK
    assert GPU.compute.layer_s == pytest.approx(loads.COMPUTE.layer_s, rel=0.05)
    assert GPU.compute.expert_s == pytest.approx(loads.COMPUTE.expert_s, rel=0.05)


# -- figures -----------------------------------------------------------------------------------------------------------


def test_a_summary_counts_who_met_both_slos() -> None:
    quick, slow_first, slow_later = Answered(0, [1, 2, 3]), Answered(1, [9, 10]), Answered(2, [3, 9])
    found = summary([quick, slow_first, slow_later], Slo(ttft_s=2, tpot_s=2))
    assert found["in_time"] == pytest.approx(1 / 3)
    assert found["rate"] == pytest.approx(3 / 10)
    assert found["goodput"] == pytest.approx(1 / 10)
    assert found["ttft"] == {"p50": 1, "p95": 8, "p99": 8}
    assert found["tpot"] == {"p50": 1, "p95": 6, "p99": 6}
    assert found["itl"] == {"p50": 1, "p95": 6, "p99": 6}
    assert summary([Answered(0, [1])], Slo(2, 2))["tpot"] is None


def test_numbers_are_short_to_read() -> None:
    assert [short(value) for value in (0.04567, 1.5, 99.96, 1605.4)] == ["0.0457", "1.5", "100", "1,605"]


def test_ratios_are_taken_seed_by_seed() -> None:
    theirs = [summary([Answered(0, [at, 2 * at])], Slo(9, 9)) for at in (1, 2)]
    ours = [summary([Answered(0, [at, 2 * at])], Slo(9, 9)) for at in (0.5, 1)]
    found = over(ours, theirs)
    assert found["ttft"]["p95"] == pytest.approx({"mean": 0.5, "within": 0, "low": 0.5, "high": 0.5, "pairs": 2})
    assert found["goodput"]["mean"] == pytest.approx(2)


@pytest.mark.usefixtures("drawn")
def test_cells_are_compared_on_the_same_requests(tmp_path: Path) -> None:
    scale = stage.Scale(
        seeds=2, requests=3, saturating=3, loads=(0.5, 1.0), arms=(BASE, PHASES), shorter=50.0, processes=1
    )  # fmt: skip
    found = stage.on_machine(scale, server(), GPU, "made up")
    places = [(cell["shorter"], cell["load"], cell["arm"]) for cell in found["cells"]]
    assert places == [
        (50.0, 0.5, "fcfs"), (50.0, 0.5, "phases"), (50.0, 1.0, "fcfs"), (50.0, 1.0, "phases"),
        (500.0, 0.5, "fcfs"), (500.0, 0.5, "phases"),
    ]  # fmt: skip
    for cell in found["cells"]:
        assert len(cell["runs"]) == 2
        if cell["arm"] == "fcfs":
            assert cell["over_fcfs"]["ttft"]["p95"]["mean"] == pytest.approx(1)
    point = {**found["cells"][0], "load": 0.5}
    whole = {"model": "made up", "machines": [found], "real": {"saturation": 1.0, "points": [point]}}
    assert "made up on GPU behind PCIe" in table(whole)
    draw(whole, tmp_path / "serving.png")
    assert (tmp_path / "serving.png").stat().st_size > 10_000


def test_without_a_trace_the_bundled_models_routing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of("bundled", trace_of(40, 40, 40, layers=2, k=2, experts=12), 0.3)
    monkeypatch.setattr(stage, "fitted_files", lambda *_: ())
    made, name = stage._server(stage.Scale(), world)
    assert (made.trace, name) == (world.measured, "bundled")
