"""The figures that the rows come to: pure, from rows to one JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.engine.link_bound import over_bound
from benchmarks.harness.inputs.prepared_models import ALL_MODELS, BUNDLED, WIDENED
from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.reporting.statistics import spread_json
from benchmarks.harness.rows import GREENROOM, ORACLES, RESIDENT, THIRD, Row, agreement, fastest, find, speed_ratio

POLICIES, SHARES, BOUNDED, FROM_DISK = "policies", "shares", "bounded", "shares, from the disk"
"""Stages. Those of policies may be several: ``policies``, ``policies 2``, ... The last takes turns with the shares:
on a GPU, without a host tier."""

PEER = "transformers"


AIMS = {
    "resident_ratio": Aim(1.2, True),
    "third_bound_ratio": Aim(1.25, False),
    "third_moved_over_belady": Aim(2.0, False),
    "third_ratio_disk_offload": Aim(8.0, True),
    "third_memory_ratio": Aim(1.0, False),
    "concurrency_ratio": Aim(2.5, True),
    "bookkeeping_share": Aim(0.05, False),
}


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures with aims, ``third_ratio_device_map``, and by model what they were taken from.

    A figure that could not be measured is None.
    """
    by_model = {model: _of_model([row for row in rows if row.model == model]) for model in ALL_MODELS}
    by_model = {model: found for model, found in by_model.items() if found}
    widened = by_model.get(WIDENED, {})
    return {
        "resident_ratio": _worst(by_model, "resident_ratio", min),
        "third_bound_ratio": _median(widened.get("third_bound_ratio")),
        "third_moved_over_belady": widened.get("third_moved_over_belady"),
        "third_ratio_disk_offload": _median(widened.get("third_ratio_disk_offload")),
        "third_memory_ratio": widened.get("third_memory_ratio"),
        "third_ratio_device_map": _median(widened.get("third_ratio_device_map")),
        "concurrency_ratio": _median(by_model.get(BUNDLED, {}).get("concurrency_ratio")),
        "bookkeeping_share": _highest(widened.get("bookkeeping", {})),
        "best_policy": widened.get("best_policy"),
        "by_model": by_model,
    }


def best_policy(rows: Sequence[Row]) -> str | None:
    """The fastest at a third, one request at a time, of those that do not know the future."""
    found = fastest(_policy_rows(rows))
    return None if found is None else found.policy


def row_json(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything about one row. Times are of all rounds, ratios of their median."""
    resident = resident_of(row, rows)
    speed, bound = row.tokens_per_s, over_bound(row, resident) if row.system == GREENROOM else None
    return {
        "stage": row.stage,
        "model": row.model,
        "system": row.system,
        "share": row.share,
        "policy": row.policy,
        "concurrency": row.concurrency,
        "instrumented": row.instrumented,
        "rounds": len(row.turns),
        "tokens": next((turn.tokens for turn in row.turns.values()), None),
        "seconds": [round(turn.seconds, 4) for turn in row.turns.values()],
        "tokens_per_s": spread_json(speed, 3),
        "peak_rss_bytes": row.peak_bytes,
        "cgroup_limit_bytes": row.limit_bytes,
        "cgroup_peak_bytes": row.cgroup_peak_bytes,
        "bytes_moved": row.bytes_moved,
        "belady_bytes": row.belady_bytes,
        "moved_over_belady": _rounded(row.moved_over_belady),
        "link_bytes_per_s": [round(turn.link) for turn in row.turns.values() if turn.link],
        "over_bound": spread_json(bound, 3),
        "hit_rate": _rounded(row.hit_rate),
        "stall_seconds": [round(turn.stall_seconds, 4) for turn in row.turns.values()],
        "inside_seconds": inside(row),
        "same_tokens_as_resident": _rounded(agreement(row, _reference(row, rows))),
        "facts": row.facts,
        "error": row.error,
    }


def resident_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The resident row that took turns with this one, on the same stream and with the same concurrency."""
    return find(
        rows, stage=row.stage, model=row.model, system=GREENROOM, share=RESIDENT, concurrency=row.concurrency,
        instrumented=False,
    )  # fmt: skip


def inside(row: Row) -> dict[str, float]:
    """Seconds of a turn by part, mean of the rounds; empty where it was not instrumented."""
    turns = [turn.inside for turn in row.turns.values() if turn.inside]
    return {part: sum(turn[part] for turn in turns) / len(turns) for part in turns[0]} if turns else {}


def bookkeeping(row: Row) -> dict[str, float]:
    """``share`` of the steps' time, without the loop around them, and microseconds a layer."""
    parts = inside(row)
    steps = sum(turn.steps for turn in row.turns.values()) / len(row.turns)
    within = sum(parts.values()) - parts["loop"]
    return {
        "share": round(parts["bookkeeping"] / within, 4),
        "us_per_layer": round(parts["bookkeeping"] * 1e6 / (steps * row.facts["layers"]), 1),
    }


def _of_model(rows: Sequence[Row]) -> dict[str, Any]:
    if not rows:
        return {}
    shares = [row for row in rows if row.stage == SHARES and not row.instrumented]
    one = find(shares, system=GREENROOM, share=RESIDENT, concurrency=1)
    eight = fastest(row for row in shares if row.system == GREENROOM and row.share == RESIDENT and row.concurrency > 1)
    peer = fastest(row for row in shares if row.system == PEER and row.concurrency == 1)
    found: dict[str, Any] = {
        "resident_ratio": spread_json(speed_ratio(one, peer), 3),
        "peer": None if peer is None else peer.policy,
        "concurrency_ratio": spread_json(speed_ratio(eight, one), 3),
        "concurrency_bound": _touched_ratio(one, eight),
    }
    if (best := fastest(_policy_rows(rows) or _thirds(shares))) is not None:
        found |= {
            "best_policy": best.policy,
            "third_bound_ratio": spread_json(over_bound(best, resident_of(best, rows)), 3),
            "third_moved_over_belady": _rounded(best.moved_over_belady),
        }
    found |= _bounded([row for row in rows if row.stage == BOUNDED])
    instrumented = [row for row in rows if row.instrumented and row.turns]
    found["bookkeeping"] = {row.share: bookkeeping(row) for row in instrumented}
    return found


def _bounded(rows: Sequence[Row]) -> dict[str, Any]:
    ours = find(rows, system=GREENROOM, share=THIRD)
    disk_offload = find(rows, system="disk_offload")
    device_map = fastest(row for row in rows if row.system == "device_map")
    found = {
        "third_ratio_disk_offload": spread_json(speed_ratio(ours, disk_offload), 3),
        "third_ratio_device_map": spread_json(speed_ratio(ours, device_map), 3),
    }
    if ours is None or disk_offload is None:
        return found
    resident_sets = ours.peak_bytes, disk_offload.peak_bytes
    charged = ours.cgroup_peak_bytes, disk_offload.cgroup_peak_bytes
    in_groups = charged[0] is not None and charged[1] is not None
    return {
        **found,
        "third_memory_ratio": _quotient(*(charged if in_groups else resident_sets)),
        "third_memory_ratio_rss": _quotient(*resident_sets),
        "memory_measured": "peak of the memory cgroup, page cache included" if in_groups else "peak RSS",
    }


def _thirds(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.system == GREENROOM and row.share == THIRD and row.concurrency == 1]


def _policy_rows(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _thirds(rows) if row.stage.startswith(POLICIES) and row.policy not in ORACLES]


def _touched_ratio(one: Row | None, eight: Row | None) -> float | None:
    """The speed-up of several requests at once if only reading weights took time: they share experts."""
    if one is None or eight is None or one.trace is None or eight.trace is None:
        return None
    return round(one.trace.bytes_touched / eight.trace.bytes_touched, 3)


def _reference(row: Row, rows: Sequence[Row]) -> Row | None:
    """The resident row of the same concurrency, so of the same batches: bf16 products round with the number of rows."""
    for stage in (row.stage, SHARES):  # where a stage has none, its stream begins as that of the shares
        for concurrency in (row.concurrency, 1):
            found = find(
                rows, stage=stage, model=row.model, system=GREENROOM, share=RESIDENT, concurrency=concurrency,
                instrumented=False,
            )  # fmt: skip
            if found is not None:
                return found
    return None


def _worst(by_model: Mapping[str, Any], name: str, choose: Callable[..., float]) -> float | None:
    """Of all models; None where one of them lacks it, since the worst is then not known."""
    values = [_median(found.get(name)) for found in by_model.values()]
    return None if not values or None in values else choose(values)


def _highest(by_share: Mapping[str, Mapping[str, float]]) -> float | None:
    return max((found["share"] for found in by_share.values()), default=None)


def _quotient(first: int | None, second: int | None) -> float | None:
    return round(first / second, 3) if first is not None and second else None


def _median(spread: Any) -> float | None:
    return None if spread is None else spread["median"]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
