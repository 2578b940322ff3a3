"""The result as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.engine.figures import AIMS, resident_of
from benchmarks.engine.link_bound import over_bound
from benchmarks.harness.inputs.prepared_models import ALL_MODELS
from benchmarks.harness.reporting.aims import figure_lines
from benchmarks.harness.rows import GREENROOM, Row
from greenroom.core.units import format_bytes

COLUMNS = ("arm", "tok/s", "(min-max)", "peak", "hits", "moved/token", "/Belady", "×bound")


def table(rows: Sequence[Row]) -> str:
    """One block a stage of a model."""
    lines: list[str] = []
    for model in ALL_MODELS:
        of_model = [row for row in rows if row.model == model]
        for stage in dict.fromkeys(row.stage for row in of_model):
            cells = [_cells(row, rows) for row in of_model if row.stage == stage]
            widths = [max(map(len, column)) for column in zip(COLUMNS, *(cell for cell, _ in cells), strict=True)]
            lines += [f"\n{model}, {stage}", _line(COLUMNS, widths)]
            for cell, note in cells:
                lines.append(_line(cell, widths) + note)
    return "\n".join(lines)


def aims(found: Mapping[str, Any]) -> str:
    """Each figure that has an aim, beside it; and accelerate's other way, which has none."""
    return "\n".join(figure_lines({name: found[name] for name in (*AIMS, "third_ratio_device_map")}, AIMS))


def by_model(found: Mapping[str, Any]) -> str:
    """What has no aim of its own, a line a model."""
    lines = []
    for model, own in found["by_model"].items():
        parts = [f"{model}:"]
        if own["resident_ratio"]:
            parts.append(f"{own['resident_ratio']['median']:.2f} × transformers ({own['peer']});")
        if own["concurrency_ratio"]:
            bound = own["concurrency_bound"]
            beside = f" (distinct experts allow {bound:.2f})" if bound else ""
            parts.append(f"eight at once {own['concurrency_ratio']['median']:.2f} × one by one{beside};")
        for share, each in own["bookkeeping"].items():
            parts.append(f"bookkeeping at {share} {each['us_per_layer']:.0f} µs a layer ({each['share']:.1%});")
        for name in ("third_ratio_disk_offload", "third_ratio_device_map"):
            if own[name]:
                parts.append(f"{name} {own[name]['median']:.2f};")
        lines.append(" ".join(parts).rstrip(";"))
    return "\n".join(lines)


def _cells(row: Row, rows: Sequence[Row]) -> tuple[tuple[str, ...], str]:
    speed = row.tokens_per_s
    bound = over_bound(row, resident_of(row, rows)) if row.system == GREENROOM else None
    peak = row.cgroup_peak_bytes or row.peak_bytes
    tokens = sum(turn.tokens for turn in row.turns.values()) / max(1, len(row.turns))
    cells = (
        row.name + (" (instrumented)" if row.instrumented else ""),
        "-" if speed is None else f"{speed.median:.1f}",
        "-" if speed is None else f"({speed.least:.1f}-{speed.most:.1f})",
        "-" if peak is None else format_bytes(peak),
        "-" if row.hit_rate is None else f"{row.hit_rate:.0%}",
        "-" if not row.bytes_moved or not tokens else format_bytes(row.bytes_moved / tokens),
        "-" if not row.moved_over_belady else f"{row.moved_over_belady:.2f}",
        "-" if bound is None else f"{bound.median:.2f}",
    )
    return cells, "" if row.error is None else f"  failed: {' '.join(row.error.split())[:160]}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [f"{cell:<{width}}" if not place else f"{cell:>{width}}"
                      for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]  # fmt: skip
    return "  ".join(["  " + first, *others])
