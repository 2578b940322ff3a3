"""The result as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.formats.figures import OF_BF16, aims, expert_memory
from benchmarks.harness.children.greenroom_child import CONCURRENCY
from benchmarks.harness.reporting.aims import figure_lines
from benchmarks.harness.reporting.statistics import spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rows import Row
from greenroom.core.units import format_bytes


def table(rows: Sequence[Row]) -> str:
    """A line for each arm."""
    arm = f"{'format':<10}{'experts':<10}{'in memory':<14}{'at once':>7}"
    lines = [f"{arm}  {'for experts':>11}  {'tokens/s':<22}{'hits':>6}"]
    for row in rows:
        failed = "" if row.error is None else f"  failed: {' '.join(row.error.split())[:160]}"
        memory = format_bytes(expert_memory(row)) if row.facts else "-"
        hits = "-" if row.hit_rate is None else f"{row.hit_rate:.0%}"
        speed = median_range(spread_json(row.tokens_per_s), 1)
        arm = f"{row.model:<10}{row.system:<10}{row.share:<14}{row.concurrency:>7}"
        lines.append(f"{arm}  {memory:>11}  {speed:<22}{hits:>6}{failed}")
    return "\n".join(lines)


def summary(found: Mapping[str, Any]) -> str:
    """Each figure that has an aim beside it, then what else was found of each format."""
    wanted = aims()
    gains = [name for name in found if name.endswith("_gain")]
    lines = figure_lines({name: found.get(name) for name in dict.fromkeys([*wanted, *gains])}, wanted)
    for name, own in found["by_format"].items():
        parts = [
            f"{name}: gains at {CONCURRENCY} at once {median_range(own[f'third_gain_{CONCURRENCY}'])} at bf16's third, "
            f"{median_range(own[f'resident_gain_{CONCURRENCY}'])} resident",
            f"a third of its own bytes {median_range(own['own_third'])} of its resident speed "
            f"({median_range(own[f'own_third_{CONCURRENCY}'])} at {CONCURRENCY})",
        ]
        if own[OF_BF16] is not None:
            parts.append(f"{own[OF_BF16]:.3f} of bf16's bytes")
        if own["all_fit_in_a_third"]:
            parts.append("all of its experts fit into bf16's third")
        lines.append("; ".join(parts))
    return "\n".join(lines)
