"""Cells of the tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Mapping


def plus_minus(found: Mapping[str, float] | None, scale: float = 1.0, digits: int = 2) -> str:
    """An interval as `statistics.interval` has it: ``1.20 ± 0.10``; a dash without one."""
    if found is None:
        return "-"
    return f"{scale * found['mean']:.{digits}f} ± {scale * found['within']:.{digits}f}"


def median_range(found: Mapping[str, float] | None, digits: int = 2) -> str:
    """A spread as `statistics.spread_json` has it: ``1.20 (1.10–1.30)``; a dash without one."""
    if found is None:
        return "-"
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}–{found['max']:.{digits}f})"
