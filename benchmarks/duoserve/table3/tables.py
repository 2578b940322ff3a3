"""Table 3 as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.duoserve.table3.misses import PRECISION

MEASURES = {"exact": "all of them", "half": "half or more", "one": "one or more", "recall": "recall"}


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for own in found["models"]:
        lines += [
            f"{own['model']}: top-{own['top_k']} of {own['experts']}, {own['layers']} layers; fitted to "
            f"{own['fitted_sequences']} sequences, measured on {own['measured_tokens']:,} tokens of "
            f"{own['measured_sequences']} others. Of a token's picks in a layer named, %",
            f"{'':<24}{'ahead':>6}"
            + "".join(f"{label:>14}" for label in MEASURES.values())
            + f"{'95 %':>14}{'misses':>14}",
        ]
        for row in own["rows"]:
            cells = "".join(f"{100 * row[name]:>14.1f}" for name in MEASURES)
            cells += f"{100 * row['recall_low']:.1f}–{100 * row['recall_high']:.1f}".rjust(14)
            misses = own["foreseen"].get(row["predictor"]) if row["ahead"] == 1 else None
            cells += f"{'-' if misses is None else format(100 * misses['share'], '.1f'):>14}"
            lines.append(f"{row['predictor']:<24}{row['ahead']:>6}{cells}")
        lines.append(
            f"misses: of those of `next-use` with {own['slots']} slots, fetched ahead when {PRECISION:.0%} of what is "
            "fetched ahead is used"
        )
        lines += _hidden(own)
        lines.append("")
    both, one = (f"{100 * least:.0f}–{100 * most:.0f}" for least, most in (found["paper"][x] for x in ("exact", "one")))
    lines.append(f"the paper (top-2 of 8, one ahead): both {both}, one or more {one}")
    return "\n".join(lines)


def _hidden(own: Mapping[str, Any]) -> list[str]:
    """What is said of predictors that read hidden states."""
    gains, lines = own["gains"], []
    for figure in (name for name in gains if not name.endswith(("_low", "_high"))):
        within = f"{gains[f'{figure}_low']:.1f} to {gains[f'{figure}_high']:.1f}"
        lines.append(f"{figure}: {gains[figure]:.1f} points of recall over the router ({within})")
    if own["cost_us"]:
        costs = ", ".join(f"{name} {cost:.0f}" for name, cost in own["cost_us"].items())
        lines.append(f"µs a layer, one row, two layers ahead: {costs}")
    return lines
