"""The result as a person reads it: a table on the terminal, a plot in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.figures import AIMS, PEER, resident_of
from benchmarks.engine.link_bound import bound_seconds, over_bound
from benchmarks.harness.aims import figure_lines
from benchmarks.harness.prepared_models import MODELS
from benchmarks.harness.rows import GREENROOM, RESIDENT, Row, fastest, paired
from benchmarks.harness.statistics import Spread
from greenroom.core.units import format_bytes

COLUMNS = ("arm", "tok/s", "(min-max)", "peak", "hits", "moved/token", "/Belady", "×bound")


def table(rows: Sequence[Row]) -> str:
    """One block a stage of a model."""
    lines: list[str] = []
    for model in MODELS:
        of_model = [row for row in rows if row.model == model]
        for stage in dict.fromkeys(row.stage for row in of_model):
            cells = [_cells(row, rows) for row in of_model if row.stage == stage]
            widths = [max(map(len, column)) for column in zip(COLUMNS, *(cell for cell, _ in cells), strict=True)]
            lines += [f"\n{model}, {stage}", _line(COLUMNS, widths)]
            for cell, note in cells:
                lines.append(_line(cell, widths) + note)
    return "\n".join(lines)


def aims(found: Mapping[str, Any]) -> str:
    """Each figure that has an aim, beside it; and accelerate's other way, which has none."""
    return "\n".join(figure_lines({name: found[name] for name in (*AIMS, "third_ratio_device_map")}, AIMS))


def by_model(found: Mapping[str, Any]) -> str:
    """What has no aim of its own, a line a model."""
    lines = []
    for model, own in found["by_model"].items():
        parts = [f"{model}:"]
        if own["resident_ratio"]:
            parts.append(f"{own['resident_ratio']['median']:.2f} × transformers ({own['peer']});")
        if own["concurrency_ratio"]:
            bound = own["concurrency_bound"]
            beside = f" (distinct experts allow {bound:.2f})" if bound else ""
            parts.append(f"eight at once {own['concurrency_ratio']['median']:.2f} × one by one{beside};")
        for share, each in own["bookkeeping"].items():
            parts.append(f"bookkeeping at {share} {each['us_per_layer']:.0f} µs a layer ({each['share']:.1%});")
        for name in ("third_ratio_disk_offload", "third_ratio_device_map"):
            if own[name]:
                parts.append(f"{name} {own[name]['median']:.2f};")
        lines.append(" ".join(parts).rstrip(";"))
    return "\n".join(lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s against the share of experts resident, with the bound; a panel for each model with such rows."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    models = [model for model in MODELS if len(_curve(rows, model)) > 1]
    if not models:
        return
    figure, panels = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 5.2), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        _panel(panel, rows, model)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cells(row: Row, rows: Sequence[Row]) -> tuple[tuple[str, ...], str]:
    speed = row.tokens_per_s
    bound = over_bound(row, resident_of(row, rows)) if row.system == GREENROOM else None
    peak = row.cgroup_peak_bytes or row.peak_bytes
    tokens = sum(turn.tokens for turn in row.turns.values()) / max(1, len(row.turns))
    cells = (
        row.name + (" (instrumented)" if row.instrumented else ""),
        "-" if speed is None else f"{speed.median:.1f}",
        "-" if speed is None else f"({speed.least:.1f}-{speed.most:.1f})",
        "-" if peak is None else format_bytes(peak),
        "-" if row.hit_rate is None else f"{row.hit_rate:.0%}",
        "-" if not row.bytes_moved or not tokens else format_bytes(row.bytes_moved / tokens),
        "-" if not row.moved_over_belady else f"{row.moved_over_belady:.2f}",
        "-" if bound is None else f"{bound.median:.2f}",
    )
    return cells, "" if row.error is None else f"  failed: {' '.join(row.error.split())[:160]}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = [f"{cell:<{width}}" if not place else f"{cell:>{width}}"
                      for place, (cell, width) in enumerate(zip(cells, widths, strict=True))]  # fmt: skip
    return "  ".join(["  " + first, *others])


def _share(row: Row) -> float:
    return 100 * float(row.facts["slots"]) / float(row.facts["experts"])


def _curve(rows: Sequence[Row], model: str) -> list[Row]:
    """greenroom's rows of one policy over the shares, one request at a time, the smallest first."""
    found = [
        row for row in rows
        if row.model == model and row.stage == "shares" and row.system == GREENROOM and row.concurrency == 1
        and not row.instrumented and row.turns
    ]  # fmt: skip
    return sorted(found, key=_share)


def _panel(panel: Any, rows: Sequence[Row], model: str) -> None:
    curve = _curve(rows, model)
    speeds = [(_share(row), row.tokens_per_s) for row in curve]
    points = [(share, speed) for share, speed in speeds if speed is not None]
    panel.errorbar(
        [share for share, _ in points], [speed.median for _, speed in points],
        yerr=[[speed.median - speed.least for _, speed in points], [speed.most - speed.median for _, speed in points]],
        marker="o", capsize=3, label=f"greenroom, {curve[0].policy}",
    )  # fmt: skip
    bounds = [(_share(row), bound) for row in curve if (bound := _bound_speed(row, rows)) is not None]
    panel.plot([x for x, _ in bounds], [y.median for _, y in bounds], "k--", label="bound: compute, or bytes ÷ link")
    alone = [row for row in rows if row.model == model and row.concurrency == 1 and not row.instrumented]
    others = "other policies"
    for row in alone:
        if row.stage.startswith("policies") and row.share != RESIDENT and row.tokens_per_s is not None:
            panel.plot(_share(row), row.tokens_per_s.median, "x", color="grey", markersize=5, label=others)
            others = "_nolegend_"
    for system, style in {PEER: "s", "device_map": "C4", "disk_offload": "C3"}.items():
        peer = fastest(row for row in alone if row.system == system)
        if peer is None or peer.tokens_per_s is None:
            continue
        if system == PEER:
            panel.plot(100, peer.tokens_per_s.median, style, fillstyle="none", label=f"transformers ({peer.policy})")
        else:
            panel.axhline(peer.tokens_per_s.median, linestyle=":", color=style,
                          label=f"accelerate {system}, a third's memory")  # fmt: skip
    panel.set(title=model, xlabel="experts resident (%)", ylabel="tokens/s", xlim=(0, 105), ylim=(0, None))
    panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)


def _bound_speed(row: Row, rows: Sequence[Row]) -> Spread | None:
    if row.share == RESIDENT:
        return row.tokens_per_s
    return paired(row, resident_of(row, rows), lambda turn, whole: turn.tokens / (bound_seconds(turn, whole) or 1e9))
