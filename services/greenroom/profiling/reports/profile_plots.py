"""A profile as pictures: eMoE's Figs 4, 5 and 10, and what tokens and loads cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from greenroom.core.model_profile import Lengths, ModelProfile
from greenroom.core.pictures import COLOURS, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart in print too.
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<")

T = TypeVar("T")


def draw_profile(profile: ModelProfile, folder: Path) -> list[Path]:
    """Writes what the profile has figures for; returns the files. Raises PlotUnavailable."""
    pictures: dict[str, Callable[[ModelProfile], Figure]] = {"lengths.png": draw_lengths}
    if any(task.sensitivity is not None for task in profile.tasks.values()):
        pictures["sensitivity.png"] = draw_sensitivity
    if profile.reuse is not None:
        pictures["reuse.png"] = draw_reuse
    if profile.costs is not None:
        pictures["costs.png"] = draw_costs
    written = []
    for name, draw in pictures.items():
        path = folder / name
        save_figure(draw(profile), path)
        written.append(path)
    return written


def draw_lengths(profile: ModelProfile) -> Figure:
    """Fig. 4: CDFs of the tokens of answers and, beside them, of prompts."""
    figure = _figure(9.4, 4.2, f"{profile.model}: how long answers and prompts are, by task")
    parts: tuple[tuple[str, Callable[[str], Lengths]], ...] = (
        ("generated tokens", lambda task: profile.tasks[task].generated_tokens),
        ("prompt tokens", lambda task: profile.tasks[task].input_tokens),
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, (label, of) in zip((left, right), parts, strict=True):
        for place, task in enumerate(profile.tasks):
            points = of(task).cdf
            tokens = [points[0][0], *(length for length, _ in points)] if points else []
            shares = [0.0, *(100 * share for _, share in points)] if points else []
            axes.step(tokens, shares, where="post", linewidth=1.7, color=COLOURS[place % len(COLOURS)], label=task)
        _plain(axes)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 102)
    left.set_ylabel("prompts with at most so many, %")
    _legend(figure, left)
    return figure


def draw_sensitivity(profile: ModelProfile) -> Figure:
    """Fig. 5: similarity to the undisturbed answers against the share of MoE layers that are routed exactly."""
    measured = {name: task.sensitivity for name, task in profile.tasks.items() if task.sensitivity is not None}
    exact = any(one.exact is not None for one in measured.values())
    figure = _figure(9.4 if exact else 6.4, 4.4, f"{profile.model}: random routing in the first MoE layers, by task")
    every = figure.subplots(1, 2 if exact else 1, squeeze=False)[0]
    similar = every[0]
    for place, (name, one) in enumerate(measured.items()):
        colour, marker = COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)]
        layers = len(one.similarity) - 1
        routed = [100 * (layers - count) / max(1, layers) for count in range(layers + 1)]
        similar.plot(routed, one.similarity, color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
        similar.fill_between(routed, one.least, one.most, color=colour, alpha=0.12, linewidth=0)
        if one.exact is not None:
            every[1].plot(routed, [100 * share for share in one.exact], color=colour, marker=marker, markersize=5)
    thresholds = sorted({one.threshold for one in measured.values()})
    for threshold in thresholds:
        similar.axhline(threshold, color="black", linestyle="--", linewidth=1, label=f"threshold {threshold:g}")
    similar.set_ylabel("similarity to the undisturbed answer")
    similar.set_ylim(top=1.02)
    if exact:
        every[1].set_ylabel("right answers, %")
        every[1].set_ylim(0, 102)
    for axes in every:
        _plain(axes)
        axes.set_xlabel("MoE layers routed exactly, %")
        axes.invert_xaxis()
    _legend(figure, similar)
    return figure


def draw_reuse(profile: ModelProfile) -> Figure:
    """Fig. 10: perplexity of given answers against the prompts for which experts are kept."""
    reuse = _known(profile.reuse)
    figure = _figure(6.4, 4.2, f"{profile.model}: {reuse.share:.0%} of the experts, kept for p prompts")
    axes = figure.subplots()
    periods = sorted(reuse.perplexity)
    axes.plot(periods, [reuse.perplexity[p] for p in periods], color=COLOURS[0], marker="o", linewidth=1.7)
    if reuse.with_all is not None:
        axes.axhline(reuse.with_all, color="black", linestyle="--", linewidth=1, label="with all experts")
    if reuse.proposed_every in reuse.perplexity:
        axes.plot(
            [reuse.proposed_every],
            [reuse.perplexity[reuse.proposed_every]],
            marker="o",
            markersize=12,
            markerfacecolor="none",
            color=COLOURS[1],
            linestyle="none",
            label=f"proposed: p = {reuse.proposed_every}",
        )
    _plain(axes)
    axes.set_xlabel("prompts that the same experts are kept for, p")
    axes.set_ylabel("perplexity of given answers")
    axes.set_xticks(periods)
    axes.legend(frameon=False)
    return figure


def draw_costs(profile: ModelProfile) -> Figure:
    """eMoE's c by batch size, and its loading latency by number of experts."""
    costs = _known(profile.costs)
    loads = costs.load_ms_by_experts
    figure = _figure(9.4 if loads else 5.4, 4.2, f"{profile.model}: what a token and what loading experts costs here")
    every = figure.subplots(1, 2 if loads else 1, squeeze=False)[0]
    rows = sorted(costs.token_ms_by_rows)
    every[0].plot(rows, [costs.token_ms_by_rows[size] for size in rows], color=COLOURS[0], marker="o", label="decoded")
    every[0].axhline(costs.prefill_token_ms, color=COLOURS[1], linestyle="--", label="of a prompt alone")
    read = sorted(size for size in costs.prompt_step_ms if size <= 4 * rows[-1])
    if read:
        shares = [costs.prompt_step_ms[size] / size for size in read]
        every[0].plot(read, shares, color=COLOURS[2], marker="s", label="of prompts")
    every[0].set_xlabel("rows in a step")
    every[0].set_ylabel("ms a token")
    every[0].set_xscale("log", base=2)
    every[0].set_xticks(rows, [str(size) for size in rows])
    every[0].set_ylim(bottom=0)
    every[0].legend(frameon=False)
    if loads:
        counts = sorted(loads)
        every[1].plot(counts, [loads[count] for count in counts], color=COLOURS[2], marker="s")
        every[1].set_xlabel("experts loaded together")
        every[1].set_ylabel("ms until all are there")
        every[1].set_xlim(left=0)
        every[1].set_ylim(bottom=0)
    for axes in every:
        _plain(axes)
    return figure


def _known(value: T | None) -> T:
    if value is None:
        raise ValueError("this profile has no such figures")
    return value


def _figure(width: float, height: float, title: str) -> Figure:
    figure = new_figure(width, height)
    figure.suptitle(title, fontsize=12, x=0.02, horizontalalignment="left")
    return figure


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)


def _plain(axes: Axes) -> None:
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
