"""What the stage found, as a person reads it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.duoserve.serving.figures import SHARES

WHAT: Final = {"ttft": "TTFT, s", "tpot": "TPOT, ms", "itl": "ITL, ms"}
_SCALE: Final = {"ttft": 1.0, "tpot": 1e3, "itl": 1e3}


def table(found: Mapping[str, Any]) -> str:
    lines = []
    for machine in found["machines"]:
        lines += [f"{found['model']} on {machine['machine']}", *_simulated(machine), ""]
    return "\n".join([*lines, "widened model, this disk and processor, really run", *_real(found["real"]), "", _NOTE])


_NOTE: Final = """p50/p95/p99, medians of the seeds; good: share of requests within both SLOs; the last two columns: p95
over that of fcfs on the same requests, geometric mean of the seeds, 95 % interval"""


def _simulated(machine: Mapping[str, Any]) -> Iterator[str]:
    for shorter, own in machine["saturation"].items():
        slo = own["slo"]
        yield (
            f"  lengths / {shorter}: saturation {own['rate']:.3g} requests/s; SLO: TTFT {slo['ttft_s']:.3g} s, TPOT"
            f" {1e3 * slo['tpot_s']:.3g} ms"
        )
    yield _head(("lengths", "load"))
    for cell in machine["cells"]:
        over = cell["over_fcfs"]
        runs = cell["runs"]
        size = f"{runs[0]['rows']}/{runs[0]['slots']}"
        yield (
            f"{'1/' + format(cell['shorter'], 'g'):>8}{cell['load']:>7g}  {cell['arm']:<18}{size:>9}{figures_of(runs)}"
            f"{ratio(over['ttft']['p95']):>19}{ratio(over['tpot']['p95']):>19}"
        )


def _real(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"  saturation {found['saturation']:.3g} requests/s"
    yield _head(("", "load"))
    for point in found["points"]:
        over = point["over_fcfs"]
        yield (
            f"{'':>8}{point['load']:>7g}  {point['arm']:<18}{'':>9}{figures_of(point['runs'])}"
            f"{ratio(over['ttft']['p95']):>19}{ratio(over['tpot']['p95']):>19}"
        )


def _head(first: tuple[str, str]) -> str:
    names = "".join(f"{name:>25}" for name in WHAT.values())
    over = f"{'TTFT p95 over':>19}{'TPOT p95 over':>19}"
    return f"{first[0]:>8}{first[1]:>7}  {'':<18}{'rows/exp.':>9}{names}{'good':>7}{over}"


def figures_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """Percentiles, and the share within the SLOs: medians of the seeds."""
    parts = []
    for what, scale in _SCALE.items():
        values = [middle(runs, what, share) for share in SHARES]
        parts.append(" / ".join("–" if value is None else short(scale * value) for value in values))
    in_time = statistics.median(run["in_time"] for run in runs)
    return "".join(f"{part:>25}" for part in parts) + f"{in_time:>7.2f}"


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def middle(runs: Sequence[Mapping[str, Any]], what: str, share: str) -> float | None:
    values = [run[what][share] for run in runs if run[what] is not None]
    return statistics.median(values) if values else None


def ratio(found: Mapping[str, float] | None) -> str:
    return "–" if found is None else f"{found['mean']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
