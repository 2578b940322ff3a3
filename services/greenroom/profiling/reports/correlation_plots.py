"""eMoE's observations as pictures: Figs 3, 7, 8 and 9."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from greenroom.core.pictures import COLOURS, check_drawing, new_figure, save_figure
from greenroom.profiling.measures.correlation import LayerCorrelation, Observations, PromptCorrelation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

TRANSITIONS = "transitions.png"
LAYERS = "layer-correlation.png"
PROMPTS = "prompt-correlation.png"
LAGS = "prompt-lags.png"

_BAR: dict[str, Any] = {"fraction": 0.03, "pad": 0.01, "aspect": 16}


def draw(observed: Observations, folder: Path) -> list[Path]:
    """Writes the pictures that there are figures for; returns the files. Raises PlotUnavailable."""
    check_drawing()
    pictures: dict[str, Figure] = {}
    if observed.transitions:
        pictures[TRANSITIONS] = _transitions(observed)
    if observed.layers is not None:
        pictures[LAYERS] = _layers(observed, observed.layers)
    if observed.prompts is not None:
        pictures[PROMPTS] = _consecutive(observed.prompts)
        pictures[LAGS] = _lags(observed.prompts)
    for name, figure in pictures.items():
        save_figure(figure, folder / name)
    return [folder / name for name in pictures]


def _transitions(observed: Observations) -> Figure:
    """Fig. 3: a row for each task; the first, the middle and the last pair of layers."""
    pairs = len(observed.layer_ids) - 1
    shown = sorted({0, pairs // 2, pairs - 1})
    figure = new_figure(0.8 + 2.7 * len(shown), 1.6 + 2.6 * len(observed.transitions))
    panels = figure.subplots(len(observed.transitions), len(shown), squeeze=False)
    for column, pair in enumerate(shown):
        shares = {task: 100 * counts[pair] / counts[pair].sum() for task, counts in observed.transitions.items()}
        most = max(float(np.percentile(of_pair, 99.8)) for of_pair in shares.values())
        images: list[AxesImage] = []
        for row, (task, of_pair) in enumerate(shares.items()):
            axes: Axes = panels[row, column]
            images.append(axes.imshow(of_pair, cmap="Blues", vmin=0, vmax=most, interpolation="nearest"))
            if row == 0:
                axes.set_title(f"layer {observed.layer_ids[pair]} → {observed.layer_ids[pair + 1]}", fontsize=11)
            if row == len(shares) - 1:
                axes.set_xlabel("expert of the next layer")
            if column == 0:
                axes.set_ylabel(f"{task}\nexpert")
        figure.colorbar(images[0], ax=panels[:, column], label="% of all transitions", location="bottom", **_BAR)
    _title(figure, "Which expert follows which, by task")
    return figure


def _layers(observed: Observations, layers: LayerCorrelation) -> Figure:
    """Fig. 7, by number and by follower."""
    figure = new_figure(9.4, 4.2)
    left, right = figure.subplots(1, 2)
    places = list(observed.layer_ids[1:])
    left.plot(places, layers.by_number, marker="o", markersize=4, color=COLOURS[0], label="as numbered")
    left.fill_between(
        places, layers.numbers_low, layers.numbers_high, color="0.8", linewidth=0, label="numbered another way"
    )
    left.set_title("a prompt's picks by expert number", fontsize=11)
    right.plot(places, layers.by_follower, marker="o", markersize=4, color=COLOURS[0], label="as routed")
    right.plot(places, layers.followers_shuffled, color="0.5", linestyle="--", label="next layer of another token")
    right.set_title("a token's expert and its best follower", fontsize=11)
    for axes in (left, right):
        _plain(axes)
        axes.set_xlabel("layer, with the one before it")
        axes.set_ylabel("correlation")
        axes.legend(frameon=False, fontsize=9)
    right.set_ylim(0, 1)
    _title(figure, "Experts of consecutive layers")
    return figure


def _consecutive(prompts: PromptCorrelation) -> Figure:
    """Fig. 8."""
    figure = new_figure(7.4, 4.0)
    axes = figure.subplots()
    places = np.arange(1, len(prompts.consecutive) + 1)
    axes.plot(places, prompts.consecutive, linestyle="", marker="o", markersize=3, color=COLOURS[0], label="each pair")
    mean = float(prompts.consecutive.mean())
    axes.axhline(mean, color=COLOURS[1], linewidth=1.6, label=f"their mean, {mean:.2f}")
    axes.axhline(
        prompts.shuffled, color="0.4", linestyle="--", linewidth=1.4, label=f"in any order, {prompts.shuffled:.2f}"
    )
    _plain(axes)
    axes.set_xlabel("prompt, with the next one")
    axes.set_ylabel("correlation of their experts")
    axes.set_ylim(min(0.0, float(prompts.consecutive.min()) - 0.03), 1)
    _legend(figure, axes)
    _title(figure, "Experts of consecutive prompts")
    return figure


def _lags(prompts: PromptCorrelation) -> Figure:
    """Fig. 9."""
    figure = new_figure(7.4, 4.0)
    axes = figure.subplots()
    lags = np.arange(1, len(prompts.mean) + 1)
    axes.fill_between(lags, prompts.low, prompts.high, color=COLOURS[0], alpha=0.12, linewidth=0, label="80 % of pairs")
    axes.plot(lags, prompts.mean, color=COLOURS[0], marker="o", markersize=4, linewidth=1.6, label="all pairs")
    if not np.isnan(prompts.other_task).all():
        if not np.isnan(prompts.same_task).all():
            axes.plot(lags, prompts.same_task, color=COLOURS[2], marker="s", markersize=4, label="of one task")
        axes.plot(lags, prompts.other_task, color=COLOURS[1], marker="^", markersize=4, label="of two tasks")
    axes.axhline(
        prompts.shuffled, color="0.4", linestyle="--", linewidth=1.4, label=f"in any order, {prompts.shuffled:.2f}"
    )
    _plain(axes)
    axes.set_xlabel("prompts later")
    axes.set_ylabel("correlation of their experts")
    axes.set_xlim(0.5, len(lags) + 0.5)
    axes.set_ylim(min(0.0, float(prompts.low.min()) - 0.03), 1)
    axes.set_xticks(lags[:: max(1, len(lags) // 10)])
    _legend(figure, axes)
    _title(figure, "Experts of prompts that are some apart")
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, fontsize=12, x=0.02, horizontalalignment="left")
