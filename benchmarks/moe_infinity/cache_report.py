"""Hit rates as a table and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from greenroom.core.pictures import COLOURS, new_figure, save_figure

BELADY: Final = "belady"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">")


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


def draw(found: Mapping[str, Any], path: Path) -> None:
    """A panel for each stream with several cache sizes. Raises PlotUnavailable."""
    rows = found["rows"]
    streams = [name for name in dict.fromkeys(row["stream"] for row in rows)
               if len({row["slots"] for row in rows if row["stream"] == name}) > 1]  # fmt: skip
    figure = new_figure(2.2 + 4.2 * len(streams), 4.2)
    axes = figure.subplots(1, len(streams), squeeze=False)[0]
    policies = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] != BELADY))
    for axis, name in zip(axes, streams, strict=True):
        own = [row for row in rows if row["stream"] == name]
        for policy in (*policies, BELADY):
            curve = sorted((row for row in own if row["policy"] == policy), key=lambda row: row["slots"])
            if len(curve) > 1:
                _curve(axis, curve, policy, policies)
        axis.set_title(f"{name}, {own[0]['at_once']} at once", fontsize=11)
        axis.set_xlabel("experts that fit")
        axis.set_ylim(0, 100)
        axis.set_xlim(left=0)
        axis.grid(True, color="0.88", linewidth=0.8)
        axis.set_axisbelow(True)
    axes[0].set_ylabel("hit rate without prefetching, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    save_figure(figure, path)


def _curve(axis: Any, curve: Sequence[Mapping[str, Any]], policy: str, policies: Sequence[str]) -> None:
    place = policies.index(policy) if policy in policies else 0
    style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": _MARKERS[place % len(_MARKERS)]}
    if policy == BELADY:
        style = {"color": "black", "linestyle": "--", "marker": "."}
    elif "literal" in policy:  # the same hits, so it lies upon the other
        style["linestyle"] = ":"
    axis.errorbar(
        [row["slots"] for row in curve], [row["hit_rate"] for row in curve], yerr=[row["deviation"] for row in curve],
        label=policy, linewidth=1.5, markersize=4.5, capsize=2, **style,
    )  # fmt: skip
