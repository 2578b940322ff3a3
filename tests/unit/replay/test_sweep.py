"""Policies × budgets × concurrency: cells, tables, JSON, picture."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.core.pictures import PlotUnavailable
from greenroom.policies.base.events import Phase
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace, TraceError
from greenroom.replay.hit_rates import optimum, replay
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.sweeps import report
from greenroom.replay.sweeps.plot import plot
from greenroom.replay.sweeps.sweep import BELADY, PolicySpec, Sweep, slots_of, specs_of
from tests.unit.replay.traces import trace_of

TRACE = trace_of(40, 30, 20, layers=3, k=2, experts=8)
TIMED = TimedReplay(TRACE, 4096, LinkProfile(4096), ComputeProfile(expert_s=0.5))


def sweep_of(
    trace: RoutingTrace = TRACE,
    *policies: str,
    slots: tuple[int, ...] = (6, 12),
    concurrency: tuple[int | None, ...] = (1, 3),
    tokens: int | None = None,
    timed: TimedReplay | None = None,
    belady: bool = True,
) -> Sweep:
    specs = tuple(PolicySpec.parse(text) for text in policies or ("lru", "decayed:decay=0.9"))
    return Sweep(trace, specs, slots, concurrency, tokens, timed, belady)


def test_a_policy_is_written_with_its_options() -> None:
    spec = PolicySpec.parse("decayed:decay=0.9")

    assert (spec.name, spec.options, spec.label) == ("decayed", {"decay": 0.9}, "decayed:decay=0.9")
    assert PolicySpec.parse("x:a=true,b=word").options == {"a": True, "b": "word"}
    with pytest.raises(InvalidConfig, match="OPTION=VALUE"):
        PolicySpec.parse("decayed:0.9")


def test_all_is_every_policy_that_can_show_something() -> None:
    on_demand = {
        "decayed", "fifo", "lfu", "lfu-reset", "lru", "lru-per-layer", "moe-infinity", "neighbour-aware", "next-use",
        "reuse",
    }  # fmt: skip
    ahead = {"duoserve", "emoe", "expertflow", "look-ahead", "next-layer", "top-k", "traced-top-k"}

    assert {spec.name for spec in specs_of(["all"], ahead=False)} == on_demand
    assert {spec.label for spec in specs_of(["all"], ahead=True)} == on_demand | ahead
    assert [spec.label for spec in specs_of(["lru", "all", "lru", "lru:a=1"], ahead=False)].count("lru") == 1


def test_the_heading_says_what_a_policy_can_not_show() -> None:
    hits, timed = sweep_of(TRACE, "lru", "top-k", "look-ahead"), sweep_of(TRACE, "top-k", "look-ahead", timed=TIMED)

    assert "without --link nothing is fetched ahead: emoe shown" in report.heading("t", sweep_of(TRACE, "emoe"), None)
    assert "without --link nothing is fetched ahead: top-k, look-ahead" in report.heading("t.npz", hits, None)
    assert "without --recall nothing is predicted: look-ahead" in report.heading("t.npz", timed, "4 KiB")
    assert "without" not in report.heading("t.npz", sweep_of(TRACE, "lru"), None)


def test_belady_by_name_is_the_optimum_that_is_there_already() -> None:
    named, unnamed = sweep_of(TRACE, "belady", "lru"), sweep_of(TRACE, "lru")

    assert named.places == unnamed.places
    assert [spec.name for _, spec, _ in sweep_of(TRACE, "belady", slots=(6,), belady=False).places] == ["belady"] * 2


@pytest.mark.parametrize(("text", "slots"), [("6", 6), ("25%", 6), ("100%", 24), ("40KiB", 10)])
def test_a_budget_is_a_number_a_share_or_a_size(text: str, slots: int) -> None:
    assert slots_of(text, SlotSizes(TRACE.catalogue(expert_bytes=4096)), sized=True) == slots


@pytest.mark.parametrize(("text", "size"), [("1", 4096), ("25", 4096), ("4%", 4096), ("40KiB", None), ("much", 4096)])
def test_what_is_no_budget_is_refused(text: str, size: int | None) -> None:
    with pytest.raises(InvalidConfig, match="budget"):
        slots_of(text, SlotSizes(TRACE.catalogue(expert_bytes=size or 1)), sized=size is not None)


def test_every_cell_is_the_replay_of_its_own() -> None:
    sweep = sweep_of()
    finished: list[None] = []

    cells = sweep.cells(finished=lambda: finished.append(None))

    assert len(finished) == len(sweep.places) == len(cells) == 2 * (2 + 1) * 2
    assert [(cell.concurrent, cell.policy, cell.slots) for cell in cells] == [
        (concurrent, spec.label, slots) for concurrent, spec, slots in sweep.places
    ]
    for cell in cells:
        assert cell.concurrent is not None
        steps = TRACE.steps(concurrent=cell.concurrent)
        if cell.policy == BELADY:
            assert cell.cache == optimum(TRACE.catalogue(), steps, cell.slots)
        else:
            name, options = ("lru", {}) if cell.policy == "lru" else ("decayed", {"decay": 0.9})
            policy = create_policy(name, catalogue=TRACE.catalogue(), options=options)
            assert cell.cache == replay(policy, steps, cell.slots)
        assert cell.tokens == 90


def test_no_policy_beats_the_optimum() -> None:
    cells = sweep_of(TRACE, "lru", "lfu", "fifo", "decayed", "belady:ahead=1").cells()
    best = {(cell.concurrent, cell.slots): cell.cache.hits for cell in reversed(cells) if cell.policy == BELADY}

    for cell in cells:
        assert cell.cache.hits <= best[cell.concurrent, cell.slots]


def test_it_stops_after_so_many_tokens() -> None:
    sweep = sweep_of(tokens=25)

    for cell in sweep.cells():
        assert cell.tokens == sweep.rows == 25
        if cell.concurrent == 1:
            assert cell.cache.lookups == 25 * 3 * 2


def test_what_can_not_be_replayed_is_refused_before_anything_runs() -> None:
    with pytest.raises(UnknownName, match="known: "):
        sweep_of(TRACE, "magic")
    with pytest.raises(UnknownName, match="speed"):
        sweep_of(TRACE, "decayed:speed=3")
    with pytest.raises(TraceError, match="ran together"):
        sweep_of(concurrency=(None,))


def test_with_a_link_every_cell_has_its_time() -> None:
    sweep = sweep_of(TRACE, "lru", tokens=30, timed=TIMED, concurrency=(3,))

    cells = sweep.cells()

    assert [cell.policy for cell in cells] == [BELADY, BELADY, "lru", "lru"]
    for cell in cells:
        assert cell.timed is not None
        assert cell.timed.seconds > cell.timed.stall_seconds > 0
        assert cell.timed.bytes_moved > 0
    assert cells[0].timed.stall_seconds < cells[2].timed.stall_seconds  # type: ignore[union-attr]


@pytest.mark.parametrize("timed", [None, TIMED])
def test_the_tables_show_every_cell(timed: TimedReplay | None) -> None:
    sweep = sweep_of(TRACE, "lru", tokens=30, timed=timed, concurrency=(1, 3))
    cells = sweep.cells()

    text = report.tables(sweep, cells, 4096)

    assert "6 (25%)" in text
    assert "one sequence at a time" in text
    assert "3 sequences at once" in text
    for cell in cells:
        assert f"{100 * cell.cache.hit_rate:.1f}" in text
        if cell.timed is not None:
            assert f"{1e3 * cell.timed.stall_seconds / cell.timed.tokens:.0f}" in text
    assert ("stall, ms a token" in text) == (timed is not None)
    assert "3 layers × 8 experts of 4 KiB, top-2" in report.heading("t.npz", sweep, "4 KiB")


def test_the_json_has_every_cell_flat() -> None:
    sweep = sweep_of(TRACE, "lru", tokens=30, timed=TIMED)
    cells = sweep.cells()

    document = json.loads(json.dumps(report.as_json("t.npz", sweep, cells, 4096)))

    assert (document["layers"], document["experts"], document["top_k"]) == (3, 24, [2, 2, 2])
    assert document["timed"]["link_bytes_per_s"] == 4096
    for record, cell in zip(document["cells"], cells, strict=True):
        assert record["policy"] == cell.policy
        assert record["hits"] + record["misses"] == record["lookups"]
        assert record["bytes_missed"] == 4096 * (cell.cache.lookups - cell.cache.hits)
        assert record["stall_seconds"] == cell.timed.stall_seconds  # type: ignore[union-attr]
        assert not any(isinstance(value, dict) for value in record.values())


def with_prompts() -> RoutingTrace:
    phase = np.where(np.arange(90) % 10 < 4, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    return RoutingTrace(TRACE.experts, TRACE.seq_starts, TRACE.num_experts, phase=phase)


def test_prompts_and_answers_have_tables_and_figures_of_their_own() -> None:
    trace = with_prompts()
    sweep = sweep_of(trace, "lru", timed=replace(TIMED, trace=trace), concurrency=(1, 3))
    cells = sweep.cells()

    text = report.tables(sweep, cells, 4096)
    records = json.loads(json.dumps(report.as_json("t.npz", sweep, cells, 4096)))["cells"]

    for title in ("hit rate, %", "stall, ms a row", "bytes moved, MiB a row"):
        assert f"{title}: prompts / answers" in text
    for record, cell in zip(records, cells, strict=True):
        assert cell.timed is not None
        prefill, decode = cell.timed.prefill, cell.timed.decode
        assert f"{100 * prefill.hits / prefill.lookups:.1f} / {100 * decode.hits / decode.lookups:.1f}" in text
        assert (record["prefill_lookups"], record["decode_lookups"]) == (prefill.lookups, decode.lookups)
        assert record["prefill_bytes_moved"] + record["decode_bytes_moved"] == record["bytes_moved"]
        assert record["prefill_rows"] + record["decode_rows"] == record["tokens"]
        if cell.policy != BELADY:  # whose hits are those of the bound, not of the engine under it
            assert record["prefill_hits"] + record["decode_hits"] == record["hits"]


def test_a_trace_without_prompts_has_no_table_of_them() -> None:
    sweep = sweep_of(TRACE, "lru", tokens=30, timed=TIMED)

    assert "prompts" not in report.tables(sweep, sweep.cells(), 4096)


def test_a_replay_that_ends_within_the_prompts_has_no_figures_of_answers() -> None:
    trace = with_prompts()
    sweep = sweep_of(trace, "lru", tokens=4, timed=replace(TIMED, trace=trace), belady=False)

    assert " / -" in report.tables(sweep, sweep.cells(), 4096)


@pytest.mark.parametrize("timed", [None, TIMED])
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, timed: TimedReplay | None, ending: str) -> None:
    sweep = sweep_of(TRACE, "lru", tokens=20, timed=timed)
    path = tmp_path / f"hits.{ending}"

    plot(sweep, sweep.cells(), path, title="a title")

    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":
        for text in ("hit rate", "experts resident", "Belady"):
            assert text.encode() in content
        assert (b"stall" in content) == (timed is not None)


def test_a_picture_that_can_not_be_drawn_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(TRACE, "lru", tokens=20)
    cells = sweep.cells()
    with pytest.raises(PlotUnavailable, match=r"hits\.doc"):
        plot(sweep, cells, tmp_path / "hits.doc", title="")
    with pytest.raises(PlotUnavailable, match="absent"):
        plot(sweep, cells, tmp_path / "absent" / "hits.png", title="")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match="greenroom\\[plot\\]"):
        plot(sweep, cells, tmp_path / "hits.png", title="")
