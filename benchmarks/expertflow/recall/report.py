"""Table 1 as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.expertflow.recall.foretellers import TABLES_PAST, TOKEN
from benchmarks.harness.reporting.plots import curve, panels_of, save, style_of, tidy

MEASURES = ("jaccard", "recall", "precision")


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for own in found["models"]:
        gain = own["gain_points"]
        lines += [
            f"{own['model']}: top-{own['top_k']} of {own['experts']}, {own['layers']} layers; learnt from "
            f"{own['fitted_tokens']:,} tokens, measured on {own['measured_tokens']:,} of "
            f"{own['measured_sequences']} other sequences",
            f"{'of a token, %':<26}{'recall':>8}{'95 %':>14}",
        ]
        for row in own["rows"]:
            within = f"{100 * row['low']:.1f}–{100 * row['high']:.1f}"
            lines.append(f"{row['predictor']:<26}{100 * row['recall']:>8.1f}{within:>14}")
        points = f"{gain['mean']:.1f} points ({gain['low']:.1f}–{gain['high']:.1f})"
        lines.append(f"tables with past over {own['best_simple']}: {points}")
        sizes = list(dict.fromkeys(row["rows"] for row in own["batches"]))
        head = "".join(f"{f'{size} rows: Jaccard, recall, precision':>40}" for size in sizes)
        lines.append(f"{'of a batch, %':<26}{head}")
        for name in dict.fromkeys(row["predictor"] for row in own["batches"]):
            of_sizes = [row for row in own["batches"] if row["predictor"] == name]
            cells = (" ".join(f"{100 * row[measure]:>8.1f}" for measure in MEASURES) for row in of_sizes)
            lines.append(f"{name:<26}" + "".join(f"{cell:>40}" for cell in cells))
        for point in own["curve"]:
            lines.append(
                f"{point['tokens']:>10,} tokens learnt from: {TOKEN} {100 * point[TOKEN]:.1f}, "
                f"{TABLES_PAST} {100 * point[TABLES_PAST]:.1f}"
            )
    paper = found["paper"]
    lines.append(f"the paper's own, by a measure that it does not print: {paper['least']:.0%} to {paper['most']:.0%}")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    figure, panels = panels_of(len(found["models"]), 2, height=3.2)
    for number, own in enumerate(found["models"]):
        bars, learnt = panels[2 * number : 2 * number + 2]
        rows = sorted(own["rows"], key=lambda row: row["recall"])
        below = [100 * (row["recall"] - row["low"]) for row in rows]
        above = [100 * (row["high"] - row["recall"]) for row in rows]
        bars.barh(range(len(rows)), [100 * row["recall"] for row in rows], xerr=[below, above], color="#0072b2")
        bars.set_yticks(range(len(rows)), [row["predictor"] for row in rows], fontsize=8)
        bars.set_xlabel("recall of a token's picks, %")
        bars.set_title(own["model"], fontsize=9)
        for place, name in enumerate((TOKEN, TABLES_PAST)):
            values = [{"mean": 100 * point[name]} for point in own["curve"]]
            curve(learnt, [point["tokens"] for point in own["curve"]], values, label=name, **style_of(place))
        learnt.set_xscale("log")
        counts = [point["tokens"] for point in own["curve"]]
        learnt.set_xticks(counts, [f"{count:,}" for count in counts])
        learnt.minorticks_off()
        learnt.tick_params(axis="x", labelsize=8)
        learnt.set_xlabel("tokens learnt from")
        learnt.set_ylabel("recall, %")
        learnt.legend(frameon=False, fontsize=8)
        tidy(bars)
        tidy(learnt)
    save(figure, path)
