"""The stage's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.reporting.tables import median_range
from benchmarks.moe_infinity.engine.parts.by_budget import WHOLE
from benchmarks.moe_infinity.engine.parts.by_request_rate import highest_rates
from greenroom.core.units import format_bytes

Found = Mapping[str, Any]


def table(found: Found) -> str:
    """All parts, one below the other."""
    parts: tuple[tuple[str, str, Callable[[Found], list[str]]], ...] = (
        ("bounded", "beside accelerate at a third of the experts, in the same memory", _bounded),
        ("one", "at a third, one prompt after the other", _third),
        ("many", "at a third, several at once", _third),
        ("batches", "Fig. 6: ms a token by batch size", _batches),
        ("rates", "Figs 4 and 5: ms a token by request rate", _rates),
        ("budgets", "Fig. 7: latency a token over the resident model's, by share of the experts", _budgets),
    )
    lines: list[str] = []
    for name, title, of in parts:
        own = found.get(name, {})
        took = f" ({own['seconds']:.0f} s)" if "seconds" in own else ""
        lines += ["", title + took, *([f"  failed: {own['error']}"] if "error" in own else of(own))]
    lines += ["", "Fig. 8: ms a token by task, at a third", *_tasks(found)]
    lines += ["", "§8.6: an expert from disk", *(line for one in found["records"] for line in _records(one))]
    for name, why in found.get("failed", {}).items():
        lines.append(f"{name} could not be opened: {why}")
    return "\n".join(lines)


def _bounded(own: Found) -> list[str]:
    lines = [_line(("", "tokens/s", "over accelerate's", "most memory"))]
    for name, row in own["rows"].items():
        peak = "-" if row["cgroup_peak_bytes"] is None else format_bytes(row["cgroup_peak_bytes"])
        said = (median_range(row["tokens_per_s"]), median_range(row["over_accelerate"]), peak)
        lines.append(_line((name, *said)) + (f"  {row['error']}" if row["error"] else ""))
    limit = own["limit_bytes"]
    return [*lines, f"  limit: {own['why_no_limit'] if limit is None else format_bytes(limit)}"]


def _third(own: Found) -> list[str]:
    heads = ("", "tokens/s", "stall ms/token", "stall removed", "of its time", "MiB/token", "hits", "fetched ahead",
             "of it wasted", "look-up", "events", "policy")  # fmt: skip
    lines = [_line(heads)]
    for name, row in own["rows"].items():
        lines.append(
            _line((
                name, median_range(row["tokens_per_s"]), f"{row['stall_ms_per_token']:.1f}",
                median_range(row["stall_recovered"]), median_range(row["time_recovered"]),
                f"{row['mib_per_token']:.1f}", f"{row['hit_rate']:.1%}", f"{row['prefetches_per_token']:.2f}/token",
                _percent(row["wasted_share"]), f"{row['lookup_share']:.2%}",
                f"{row['events_share']:.2%}", f"{row['policy_share']:.2%}",
            ))
        )  # fmt: skip
    other = [name for name, row in own["rows"].items() if not row["same_answers"]]
    return [*lines, *([f"  other answers: {', '.join(other)}"] if other else [])]


def _batches(own: Found) -> list[str]:
    return _by_point(own["points"], [str(point["size"]) for point in own["points"]], "ms_per_token")


def _rates(own: Found) -> list[str]:
    lines = _by_point(own["points"], [f"{point['rate']:.2f}/s" for point in own["points"]], "mean_ms")
    lines += [
        f"  arrivals: {own['arrivals']}; 1 × is {own['saturation']:.2f}/s; {own['requests']} requests a round; "
        f"accelerate has the first {own['peer_requests']} alone, so its queue stays short"
    ]
    for bound in bounds_of(own):
        kept = {name: "-" if rate is None else f"{rate:.2f}/s" for name, rate in highest_rates(own, bound).items()}
        lines.append(f"  within {bound:.0f} ms a token: " + ", ".join(f"{name} {rate}" for name, rate in kept.items()))
    return lines


def bounds_of(rates: Found) -> tuple[float, ...]:
    """Latencies a token between what the best arm has at the lowest rate and at the highest."""
    means = [min(row["mean_ms"]["median"] for row in point["rows"].values()) for point in rates["points"]]
    return (1.5 * min(means), 3 * min(means))


def _budgets(own: Found) -> list[str]:
    points = sorted(own["points"], key=lambda point: float(point["share"]))
    lines = _by_point(points, [f"{point['share']:.0%}" for point in points], "over_resident")
    for bound, shares in own["smallest"].items():
        kept = {name: "-" if share is None else f"{share:.0%}" for name, share in shares.items() if name != WHOLE.name}
        lines.append(f"  smallest within {bound} ×: " + ", ".join(f"{name} {share}" for name, share in kept.items()))
    return lines


def _tasks(found: Found) -> list[str]:
    rows = {name: {task: one["mean"] for task, one in row["ms_per_token_by_task"].items()}
            for name, row in found["one"].get("rows", {}).items()}  # fmt: skip
    peer = found["bounded"].get("accelerate_ms_per_token_by_task", {})
    tasks = list(dict.fromkeys(task for row in rows.values() for task in row))
    lines = [_line(("", *tasks))]
    for name, row in {**rows, "disk_offload": peer}.items():
        lines.append(_line((name, *(f"{row[task]:.1f}" if task in row else "-" for task in tasks))))
    return lines


def _records(own: Found) -> list[str]:
    if "error" in own:
        return [f"  failed: {own['error']}"]
    lines = []
    for way, row in own["ways"].items():
        lines.append(
            f"  {format_bytes(own['record_bytes']):<10} {way:<42} {median_range(row['us'], 0):>20} µs, "
            f"{median_range(row['over_record'])} × one record, {row['reads']:.0f} reads"
        )
    return lines


def _by_point(points: Sequence[Found], heads: Sequence[str], key: str) -> list[str]:
    """A line an arm, and why accelerate is missing where it failed."""
    names = dict.fromkeys(name for point in points for name in point["rows"])
    lines = [_line(("", *heads))]
    for name in names:
        lines.append(_line((name, *(median_range(point["rows"].get(name, {}).get(key), 1) for point in points))))
    errors = {head: point.get("accelerate_error") for head, point in zip(heads, points, strict=True)}
    return [*lines, *(f"  accelerate, {head}: {error}" for head, error in errors.items() if error)]


def _line(cells: Sequence[str]) -> str:
    return f"  {cells[0]:<22}" + "".join(f"{cell:>22}" for cell in cells[1:])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
