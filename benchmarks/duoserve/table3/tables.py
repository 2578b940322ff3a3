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
            f"{'':<24}{'ahead':>6}" + "".join(f"{label:>14}" for label in MEASURES.values()) + f"{'misses':>14}",
        ]
        for row in own["rows"]:
            cells = "".join(f"{100 * row[name]:>14.1f}" for name in MEASURES)
            misses = own["foreseen"].get(row["predictor"]) if row["ahead"] == 1 else None
            cells += f"{'-' if misses is None else format(100 * misses['share'], '.1f'):>14}"
            lines.append(f"{row['predictor']:<24}{row['ahead']:>6}{cells}")
        lines.append(
            f"misses: of those of `next-use` with {own['slots']} slots, fetched ahead when {PRECISION:.0%} of what is "
            "fetched ahead is used"
        )
        lines.append("")
    both, one = (f"{100 * least:.0f}–{100 * most:.0f}" for least, most in (found["paper"][x] for x in ("exact", "one")))
    lines.append(f"the paper (top-2 of 8, one ahead): both {both}, one or more {one}")
    return "\n".join(lines)
