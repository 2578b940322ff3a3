"""The stage's tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.reporting.tables import median_range
from greenroom.core.units import MIB, format_bytes


def table(found: Mapping[str, Any]) -> str:
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    share = found["loading_share"]
    lines = [
        f"{found['experts']} experts, {format_bytes(found['expert_bytes'])}; memory {format_bytes(found['memory'])}; "
        f"{found['requests']} requests; disk {found['gb_a_second']:.2f} GB/s, "
        f"{found['checked_gb_a_second']:.2f} where checksums are compared",
        f"bound: {found['bound_per_s']:.0f} requests/s by {found['limits']}, {found['least_switches']} switches",
        f"loading's share of a cold request: {share['engine']:.2f} by the engine, {share['from_pretrained']:.2f} by "
        "from_pretrained (paper: 0.9)",
        "",
        f"{'system':<26}{'exec.':>6}{'requests/s':>22}{'replayed':>10}{'error':>7}{'switches':>10}{'repl.':>7}"
        f"{'of one':>8}{'ms a load':>11}{'batch':>7}{'moved':>7}{'MiB announced':>15}{'peak':>7}",
    ]
    for name, row in found["rows"].items():
        lines.append(
            f"{name:<26}{row['executors']:>6}{median_range(row['per_s'], 1):>22}{row['foretold']['per_s']:>10.1f}"
            f"{row['replay_error']:>7.2f}{_median(row, 'switches', 0):>10}{row['foretold']['switches']:>7}"
            f"{_median(row, 'switches_of_a_memory', 0):>8}{_median(row, 'load_ms', 1):>11}{_median(row, 'batch', 1):>7}"
            f"{_median(row, 'moved_over_loaded', 3):>7}{_mib(row, 'announced'):>15}{_mib(row, 'peak'):>7}"
        )
    lines += [
        "",
        f"a line of {found['line_rate']:.0f} requests/s",
        f"{'system':<26}{'requests/s':>11}{'p50, s':>9}{'p99, s':>9}{'replayed':>10}{'switches':>10}{'moved':>7}",
    ]
    for name, row in found["line"].items():
        lines.append(
            f"{name:<26}{row['per_s']:>11.1f}{row['p50_s']:>9.2f}{row['p99_s']:>9.2f}{row['foretold_p99_s']:>10.2f}"
            f"{row['switches']:>10}{row['moved_over_loaded']:>7.3f}"
        )
    lines.append("moved: bytes within the memory, over bytes loaded; of one: switches of the memory that has most")
    return "\n".join(lines)


def _median(row: Mapping[str, Any], name: str, digits: int) -> str:
    return f"{row[name]['median']:.{digits}f}" if row.get(name) else "-"


def _mib(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]['max'] / MIB:.0f}" if row.get(name) else "-"
