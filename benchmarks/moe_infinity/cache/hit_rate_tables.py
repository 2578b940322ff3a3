"""Hit rates as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(found: Mapping[str, Any]) -> str:
    """Hit rates by policy and cache size, a block for each stream; ± is a standard deviation over worlds."""
    rows = found["rows"]
    places = list(dict.fromkeys((row["stream"], row["at_once"]) for row in rows))
    blocks = [_block([row for row in rows if (row["stream"], row["at_once"]) == place]) for place in places]
    return "\n\n".join([*blocks, *_verdicts(found)])


def _block(rows: Sequence[Mapping[str, Any]]) -> str:
    slots = sorted({row["slots"] for row in rows})
    cells = {(row["policy"], row["slots"]): row for row in rows}
    lines = [f"{rows[0]['stream']}, {rows[0]['at_once']} at once: hit rate, %, by slots"]
    lines.append(f"{'':30}" + "".join(f"{size:>14}" for size in slots))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        shown = "".join(f"{_rate(cells.get((policy, size))):>14}" for size in slots)
        lines.append(f"{policy:30}{shown}")
    return "\n".join(lines)


def _rate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['hit_rate']:.1f}" + (f" ± {row['deviation']:.1f}" if row["worlds"] > 1 else "")


def _verdicts(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, own in found["synthetic"].items():
        stands = found["calibrated"][name]
        policy, rate, wanted = stands["best_baseline"]
        fits = "" if stands["within_a_point"] else ": NOT as calibrated"
        lines += [
            f"{name}: best baseline {policy} {rate:.1f} (paper {wanted:g}), "
            f"Belady {stands['belady'][0]:.1f} (paper {stands['belady'][1]:g}){fits}",
            f"  moe-infinity: {_points(own['oracle_gap'])} under Belady, "
            f"{_points(own['gain_over_best_baseline'])} over the best baseline",
            f"  under Belady too: {_listed(own['under_belady'])}",
            *(f"  over {lfu}: {_listed(gains)}" for lfu, gains in own["over"].items()),
        ]
    for policy, gaps in found["real_gaps"].items():
        lines.append(f"recorded: {policy} under Belady: " + ", ".join(f"{gap:.1f} {at}" for at, gap in gaps.items()))
    return ["\n".join(lines)]


def _listed(found: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} {_points(value)}" for name, value in found.items())


def _points(value: Sequence[float]) -> str:
    return f"{value[0]:.1f} ± {value[1]:.1f}"
