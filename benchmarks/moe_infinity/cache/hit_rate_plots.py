"""The picture of hit rates against the experts that fit (MoE-Infinity, Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import curve, legend_below, pairs_of, save, style_of, tidy

BELADY = "belady"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A panel for each stream with several cache sizes. Raises PlotUnavailable."""
    rows = found["rows"]
    streams = [name for name in dict.fromkeys(row["stream"] for row in rows)
               if len({row["slots"] for row in rows if row["stream"] == name}) > 1]  # fmt: skip
    figure, axes = pairs_of(len(streams))
    policies = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] != BELADY))
    for axis, name in zip(axes, streams, strict=True):
        own = [row for row in rows if row["stream"] == name]
        for policy in (*policies, BELADY):
            own_rows = sorted((row for row in own if row["policy"] == policy), key=lambda row: row["slots"])
            if len(own_rows) > 1:
                _curve(axis, own_rows, policy, policies)
        axis.set_title(f"{name}, {own[0]['at_once']} at once", fontsize=11)
        axis.set_xlabel("experts that fit")
        axis.set_ylim(0, 100)
        axis.set_xlim(left=0)
        tidy(axis)
    for axis in axes[::2]:
        axis.set_ylabel("hit rate without prefetching, %")
    legend_below(figure, axes)
    save(figure, path)


def _curve(axis: Any, rows: Sequence[Mapping[str, Any]], policy: str, policies: Sequence[str]) -> None:
    style = style_of(policies.index(policy) if policy in policies else 0)
    if policy == BELADY:
        style = {"color": "black", "linestyle": "--", "marker": "."}
    elif "literal" in policy:  # the same hits, so it lies upon the other
        style["linestyle"] = ":"
    rates = [{"mean": row["hit_rate"], "within": row["deviation"]} for row in rows]
    curve(axis, [row["slots"] for row in rows], rates, label=policy, **style)
