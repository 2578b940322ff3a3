from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.engine.figures import AIMS, BOUNDED, PEER, SHARES, best_policy, figures, row_json
from benchmarks.harness.inputs.prepared_models import BUNDLED, RANDOM, WIDENED
from benchmarks.harness.reporting.aims import figure_lines
from benchmarks.harness.rows import GREENROOM, RESIDENT, THIRD, Row
from tests.unit.benchmarks.made_turns import row, trace

KEYS = {
    "resident_ratio", "third_bound_ratio", "third_moved_over_belady", "third_ratio_disk_offload",
    "third_memory_ratio", "third_ratio_device_map", "concurrency_ratio", "bookkeeping_share",
}  # fmt: skip
FACTS = {"expert_bytes": 10, "slots": 31, "experts": 96, "layers": 6, "announced_bytes": 1}


def ours(stage: str, model: str, share: str, seconds: list[float], **values: Any) -> Row:
    return row(stage, model, GREENROOM, seconds, **{"share": share, "policy": "lru", "facts": FACTS, **values})


def shares(model: str, resident: float, peers: dict[str, float], eight: float) -> list[Row]:
    return [
        ours(SHARES, model, RESIDENT, [resident], trace=trace(touched=800)),
        ours(SHARES, model, RESIDENT, [eight], concurrency=8, trace=trace(touched=200)),
        *(row(SHARES, model, PEER, [taken], share=RESIDENT, policy=name) for name, taken in peers.items()),
    ]


def whole_run() -> list[Row]:
    """Widened: two policies and the oracle at a third; accelerate bounded; one instrumented row."""
    moved = {"bytes_moved": 120, "link": 60.0}
    parts = {"experts": 0.6, "bookkeeping": 0.03, "waiting": 0.37, "loop": 0.5}
    return [
        ours("policies", WIDENED, RESIDENT, [1.0]),
        ours("policies", WIDENED, THIRD, [4.0], policy="fifo", trace=trace(belady=60), each=moved),
        ours("policies 2", WIDENED, RESIDENT, [1.0]),
        ours("policies 2", WIDENED, THIRD, [3.0], policy="lfu", trace=trace(belady=80), each=moved),
        ours("policies 2", WIDENED, THIRD, [2.0], policy="belady", trace=trace(belady=80), each=moved),
        *shares(WIDENED, 1.0, {"eager": 3.0, "grouped_mm": 2.0}, 0.5),
        ours(SHARES, WIDENED, THIRD, [1.0], instrumented=True, each={"inside": parts, "steps": 10}),
        ours(BOUNDED, WIDENED, THIRD, [1.0], cgroup_peak_bytes=80, each={"peak_bytes": 90}),
        row(BOUNDED, WIDENED, "disk_offload", [9.0], cgroup_peak_bytes=100, each={"peak_bytes": 60}),
        row(BOUNDED, WIDENED, "device_map", [3.0], cgroup_peak_bytes=100),
        *shares(RANDOM, 1.0, {"grouped_mm": 1.5}, 0.5),
        *shares(BUNDLED, 1.0, {"grouped_mm": 1.8}, 0.25),
    ]


def test_the_figures_of_a_whole_run() -> None:
    found = figures(whole_run())
    assert found.keys() >= KEYS
    assert found["resident_ratio"] == 1.5, "against the best implementation of each model, the worst of the models"
    assert found["best_policy"] == "lfu", "the fastest that does not know the future"
    assert found["third_bound_ratio"] == 1.5, "3 s; its 120 bytes take 2 s at 60 a second"
    assert found["third_moved_over_belady"] == 1.5, "120 bytes over 8 misses of 10"
    assert found["third_ratio_disk_offload"] == 9.0
    assert found["third_ratio_device_map"] == 3.0
    assert found["third_memory_ratio"] == 0.8, "peaks of the cgroups"
    assert found["by_model"][WIDENED]["third_memory_ratio_rss"] == 1.5
    assert found["concurrency_ratio"] == 4.0, "of the bundled model"
    assert found["by_model"][WIDENED]["concurrency_ratio"]["median"] == 2.0
    assert found["by_model"][WIDENED]["concurrency_bound"] == 4.0, "a fourth of the bytes touched"
    assert found["bookkeeping_share"] == 0.03, "of the steps, the loop around them left out"
    assert found["by_model"][WIDENED]["bookkeeping"][THIRD]["us_per_layer"] == 500.0


def test_without_cgroups_memory_is_that_of_the_resident_sets() -> None:
    rows = whole_run()
    for each in rows:
        each.cgroup_peak_bytes = None
    found = figures(rows)
    assert found["third_memory_ratio"] == 1.5
    assert found["by_model"][WIDENED]["memory_measured"] == "peak RSS"


def test_what_was_not_measured_is_none_and_misses_no_aim() -> None:
    found = figures([])
    assert all(found[key] is None for key in KEYS)


def test_the_worst_of_the_models_is_not_known_while_one_lacks_it() -> None:
    rows = [each for each in whole_run() if not (each.model == RANDOM and each.system == PEER)]
    assert figures(rows)["resident_ratio"] is None


def test_an_arm_that_failed_leaves_the_others_figures() -> None:
    rows = whole_run()
    failed = next(each for each in rows if each.system == "disk_offload")
    failed.turns, failed.error = {}, "killed"
    found = figures(rows)
    assert found["third_ratio_disk_offload"] is None
    assert found["third_memory_ratio"] is None
    assert found["third_ratio_device_map"] == 3.0
    assert row_json(failed, rows)["error"] == "killed"


def test_aims_are_reached_at_their_value() -> None:
    for aim in AIMS.values():
        assert aim.verdict(aim.value) == "met"
        assert aim.verdict(aim.value * (0.99 if aim.at_least else 1.01)) == "missed"
        assert aim.verdict(None) == "not measured"
    assert figure_lines({"resident_ratio": 1.1, "other": None}, AIMS) == [
        "resident_ratio                 1.100   aim ≥ 1.2    missed",
        "other                              -",
    ]


def test_rows_are_json_with_their_bound() -> None:
    rows = whole_run()
    found = [json.loads(json.dumps(row_json(each, rows))) for each in rows]
    lfu = next(each for each in found if each["policy"] == "lfu")
    assert lfu["over_bound"] == {"median": 1.5, "min": 1.5, "max": 1.5}
    assert lfu["belady_bytes"] == 80
    assert lfu["tokens_per_s"]["median"] == pytest.approx(10 / 3, abs=1e-3)
    assert found[0]["same_tokens_as_resident"] == 1.0
    assert all(each.keys() == lfu.keys() for each in found)


def test_the_best_policy_is_none_where_no_policy_ran() -> None:
    assert best_policy(shares(WIDENED, 1.0, {"eager": 2.0}, 1.0)) is None
    assert best_policy(whole_run()) == "lfu"
