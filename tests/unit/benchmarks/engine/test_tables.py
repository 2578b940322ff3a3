from __future__ import annotations

from pathlib import Path

from benchmarks.engine.figures import BOUNDED, PEER, SHARES, figures
from benchmarks.engine.speed_plot import plot
from benchmarks.engine.tables import aims, by_model, table
from benchmarks.harness.inputs.prepared_models import WIDENED
from benchmarks.harness.rows import GREENROOM, RESIDENT, THIRD, Row
from tests.unit.benchmarks.made_turns import row, trace


def rows() -> list[Row]:
    facts = {"expert_bytes": 1 << 20, "slots": 96, "experts": 96, "layers": 6}
    each = {"bytes_moved": 20 << 20, "link": float(10 << 20), "hits": 3, "look_ups": 4, "peak_bytes": 1 << 30}
    return [
        row(SHARES, WIDENED, GREENROOM, [1.0, 1.0], share=RESIDENT, policy="lru", facts=facts),
        row(SHARES, WIDENED, GREENROOM, [3.0, 5.0], share=THIRD, policy="lfu", each=each, trace=trace(belady=10 << 20),
            facts={**facts, "slots": 31}),
        row(SHARES, WIDENED, PEER, [2.0, 2.0], share=RESIDENT, policy="eager"),
        Row(BOUNDED, WIDENED, "disk_offload", error="killed by the kernel:\nit needs more"),
        row(BOUNDED, WIDENED, "device_map", [4.0], cgroup_peak_bytes=2 << 30, each={"peak_bytes": 1 << 30}),
    ]  # fmt: skip


def line_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(name))


def test_the_table_has_a_line_for_each_row() -> None:
    text = table(rows())
    third = line_of(text, "greenroom 33% lfu")
    assert third.split() == [
        "greenroom", "33%", "lfu", "2.7", "(2.0-3.3)", "1", "GiB", "75%", "2", "MiB", "2.00", "2.00",
    ]  # fmt: skip
    assert "failed: killed by the kernel: it needs more" in line_of(text, "disk_offload")
    assert "2 GiB" in line_of(text, "device_map"), "the peak of its cgroup where it had one"
    assert len({len(line) for line in text.splitlines() if line.startswith("  greenroom")}) == 1, "columns line up"


def test_the_aims_say_what_was_met_missed_and_not_measured() -> None:
    text = aims(figures(rows()))
    assert line_of(text, "resident_ratio").split() == ["resident_ratio", "2.000", "aim", "≥", "1.2", "met"]
    assert line_of(text, "third_bound_ratio").split()[-1] == "missed"
    assert line_of(text, "bookkeeping_share").split()[1:] == ["-", "aim", "≤", "0.05", "not", "measured"]


def test_every_model_has_a_line() -> None:
    found = figures(rows())
    assert by_model(found).startswith("widened: 2.00 × transformers (eager)")
    found["by_model"]["widened"] |= {
        "concurrency_ratio": {"median": 1.5}, "concurrency_bound": 3.0,
        "bookkeeping": {"33%": {"share": 0.031, "us_per_layer": 120.4}},
    }  # fmt: skip
    line = by_model(found)
    assert "eight at once 1.50 × one by one (distinct experts allow 3.00)" in line
    assert "bookkeeping at 33% 120 µs a layer (3.1%)" in line


def test_the_plot_is_a_picture_and_nothing_where_there_is_no_curve(tmp_path: Path) -> None:
    plot(rows(), tmp_path / "deep" / "engine.png")
    assert (tmp_path / "deep" / "engine.png").read_bytes().startswith(b"\x89PNG")
    plot([each for each in rows() if each.stage == BOUNDED], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
