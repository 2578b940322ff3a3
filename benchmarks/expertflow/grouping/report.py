"""What grouping saves, as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.reporting.plots import curve, grouped_bars, panels_of, save, style_of, tidy
from benchmarks.harness.reporting.tables import median_range


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for own in found["models"]:
        names = list(own["batches"][0]["experts"])
        lines += [
            f"{own['model']}: distinct experts a layer of two batches",
            f"{'rows of each':<14}" + "".join(f"{name:>22}" for name in names) + f"{'saving, foretold/true':>26}",
        ]
        for row in own["batches"]:
            cells = "".join(f"{median_range(row['experts'][name]):>22}" for name in names)
            lines.append(f"{row['rows']:<14}{cells}{median_range(row['share']):>26}")
        lines.append(
            f"{found['machine']}, {own['cells'][0]['slots']} slots\n"
            f"{'running':>8}{'a forward':>11}{'batching':>26}{'paths':>10}{'forwards':>10}{'ready %':>9}"
            f"{'ms a row':>10}{'ms a round':>12}{'MiB a row':>11}"
        )
        for cell in (cell for cell in own["cells"] if cell["seed"] == 0):
            bound = "all" if cell["rows_per_forward"] is None else cell["rows_per_forward"]
            batching = cell["batching"] + ("" if cell["told"] else ", not told")
            lines.append(
                f"{cell['running']:>8}{bound:>11}{batching:>26}{'known' if cell['known'] else 'tables':>10}"
                f"{cell['forwards']:>10.2f}{100 * cell['ready_rate']:>9.1f}{cell['ms']:>10.2f}{cell['round_ms']:>12.1f}"
                f"{cell['mib']:>11.1f}"
            )
        for name, ratio in own["bounded"].items():
            lines.append(f"bounded, {name}: bytes over fixed groups' {median_range(ratio, 3)}")
        for paths, ratio in own["across_steps"].items():
            lines.append(f"bounded, {paths}: time with wants across steps over that without {median_range(ratio, 3)}")
        for running, ratio in own["unbounded"].items():
            forwards, latency = own["forwards"][running], median_range(own["latency"][running], 3)
            lines.append(
                f"unbounded, {running} running: {forwards:.2f} forwards a round as chosen, time over one forward's "
                f"{median_range(ratio, 3)}; two groups in any case: a round's {latency}"
            )
        for running, ratio in own["forced"].items():
            moved = median_range(ratio, 3)
            lines.append(f"two groups by true paths, {running} running: bytes over one forward's {moved}")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    figure, panels = panels_of(len(found["models"]), 2, height=3.4)
    for number, own in enumerate(found["models"]):
        bars, times = panels[2 * number : 2 * number + 2]
        names = list(own["batches"][0]["experts"])
        arms = {name: [row["experts"][name] for row in own["batches"]] for name in names}
        grouped_bars(bars, [f"2 × {row['rows']}" for row in own["batches"]], arms)
        bars.set_ylabel("distinct experts a layer")
        bars.set_title(own["model"], fontsize=9)
        bars.legend(frameon=False, fontsize=6)
        for place, (label, key) in enumerate((("as chosen: time", "unbounded"), ("two groups: a round", "latency"))):
            curve(times, [int(n) for n in own[key]], list(own[key].values()), label=label, **style_of(place))
        times.set_xlabel("running")
        times.set_ylabel("over one forward's")
        times.legend(frameon=False, fontsize=8)
        tidy(bars)
        tidy(times)
    save(figure, path)
