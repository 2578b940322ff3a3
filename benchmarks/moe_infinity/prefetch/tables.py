"""Recall and expert-ready latency as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.reporting.tables import plus_minus

_SHOWN = (
    ("ready", "ready", 100), ("mean_wait_ms", "mean ms", 1), ("p50_ms", "p50", 1), ("p95_ms", "p95", 1),
    ("p99_ms", "p99", 1), ("layer_p50_ms", "a layer: p50", 1), ("layer_p99_ms", "p99", 1),
    ("token_ms", "ms a token", 1), ("wasted", "wasted", 100),
)  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    lines = ["Fig. 9: recall of prefetching, %, at PCIe 4.0 (k: of the highest recall)"]
    lines += _recalls(found["experts"], lambda row: f"{row['experts']} experts")
    for model in dict.fromkeys(row["model"] for row in found["bandwidth"]):
        lines += ["", f"Fig. 10: the same against the link, {model}"]
        own = [row for row in found["bandwidth"] if row["model"] == model]
        lines += _recalls(own, lambda row: f"{row['link'] / 1e9:g} GB/s")
        lines += ["while decoding", *_recalls(own, lambda row: f"{row['link'] / 1e9:g} GB/s", "decoding")[1:]]
    for row in found["latency"]:
        link = found["link_of_latency"] / 1e9
        lines += ["", f"expert-ready latency, ms: {row['model']}, {row['at_once']} at once, {row['slots']} slots, "
                  f"{link:g} GB/s (ready and wasted: %)"]  # fmt: skip
        lines.append(f"{'':<26}" + "".join(f"{label:>15}" for _, label, _ in _SHOWN))
        for arm, values in row["arms"].items():
            lines.append(
                f"{arm:<26}" + "".join(f"{plus_minus(values[name], scale, 1):>15}" for name, _, scale in _SHOWN)
            )
    return "\n".join(lines)


def _recalls(rows: Sequence[Mapping[str, Any]], named: Any, key: str = "recall") -> list[str]:
    arms = list(dict.fromkeys(arm for row in rows for arm in row["arms"]))
    lines = [f"{'':<14}" + "".join(f"{arm:>22}" for arm in arms)]
    for row in rows:
        cells = []
        for arm in arms:
            value = row["arms"].get(arm)
            k = f" (k={value['k']})" if value is not None and "k" in value else ""
            cells.append("-" if value is None else plus_minus(value[key], 100, 1) + k)
        lines.append(f"{named(row):<14}" + "".join(f"{cell:>22}" for cell in cells))
    return lines
