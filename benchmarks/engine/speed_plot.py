"""The picture of tokens/s against the share of experts resident, beside the bound of the link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.figures import PEER, resident_of
from benchmarks.engine.link_bound import bound_seconds
from benchmarks.harness.inputs.prepared_models import ALL_MODELS
from benchmarks.harness.reporting.plots import curve, legend_below, pairs_of, save, tidy
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rows import GREENROOM, RESIDENT, Row, fastest, paired


def plot(rows: Sequence[Row], path: Path) -> None:
    """Tokens/s against the share of experts resident, with the bound; a panel for each model with such rows.

    Raises PlotUnavailable.
    """
    models = [model for model in ALL_MODELS if len(_curve(rows, model)) > 1]
    if not models:
        return
    figure, panels = pairs_of(len(models))
    for panel, model in zip(panels, models, strict=True):
        _panel(panel, rows, model)
    legend_below(figure, panels, 3)
    save(figure, path)


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
    own = _curve(rows, model)
    speeds = [(_share(row), speed) for row in own if (speed := spread_json(row.tokens_per_s)) is not None]
    curve(panel, [at for at, _ in speeds], [speed for _, speed in speeds], marker="o",
          label=f"greenroom, {own[0].policy}")  # fmt: skip
    bounds = [(_share(row), bound) for row in own if (bound := _bound_speed(row, rows)) is not None]
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
    tidy(panel)


def _bound_speed(row: Row, rows: Sequence[Row]) -> Spread | None:
    if row.share == RESIDENT:
        return row.tokens_per_s
    return paired(row, resident_of(row, rows), lambda turn, whole: turn.tokens / (bound_seconds(turn, whole) or 1e9))
