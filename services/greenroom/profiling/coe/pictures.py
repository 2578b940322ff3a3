"""A collaboration's profile as pictures: CoServe's Figs 5, 6, 11 and 12, and what was tried (Figs 17 and 18)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from greenroom.core.coe_profile import ArchitectureCosts, CoeProfile, ExecutorsProfile
from greenroom.core.pictures import COLOURS, new_figure, save_figure
from greenroom.core.units import MIB
from greenroom.profiling.coe.table import labels_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<")
_MOST_SHOWN: Final = 8
"""Architectures in a picture; more would hide each other."""

Draw = Callable[[CoeProfile, str], "Figure"]


def draw_coe_profile(profile: CoeProfile, beside: Path) -> list[Path]:
    """Writes PNG files beside this one, for each kind of executor; returns them. Raises PlotUnavailable."""
    pictures: dict[str, Draw] = {
        "latency": draw_latency,
        "batches": draw_batches,
        "memory": draw_memory,
        "usage": draw_usage,
        "trials": draw_trials,
    }
    written = []
    for kind in profile.kinds:
        for name, draw in pictures.items():
            path = beside.with_name(f"{beside.stem}-{kind}-{name}.png")
            save_figure(draw(profile, kind), path)
            written.append(path)
    return written


def draw_latency(profile: CoeProfile, kind: str) -> Figure:
    """Fig. 5: time a request against batch size; the maximum batch is where it plateaus."""
    own = profile.kinds[kind]
    figure, axes = _one(f"{profile.collaboration}: time a request on {_with(own, kind)}")
    for _, label, colour, marker, costs in _architectures(profile, own):
        times = costs.by_executors[own.executors]
        sizes = sorted(times.ms_by_batch)
        axes.plot(
            sizes, [times.ms_by_batch[size] / size for size in sizes],
            color=colour, marker=marker, markersize=5, linewidth=1.6, label=f"{label}: {times.most}",
        )  # fmt: skip
        axes.plot(
            [times.most], [times.ms_by_batch[times.most] / times.most],
            color=colour, marker="o", markersize=13, markerfacecolor="none", markeredgewidth=1.6, linestyle="none",
        )  # fmt: skip
    _by_batch(axes, {size for costs in own.architectures.values() for size in costs.bytes_by_batch})
    axes.set_ylabel("ms a request")
    axes.legend(frameon=False, title=_titled(profile, "maximum batch (ringed)"))
    return figure


def draw_batches(profile: CoeProfile, kind: str) -> Figure:
    """Fig. 12: time of a batch against its size, and the line B + K · n up to the maximum batch."""
    own = profile.kinds[kind]
    figure, axes = _one(f"{profile.collaboration}: time of a batch on {_with(own, kind)}")
    for _, label, colour, marker, costs in _architectures(profile, own):
        times = costs.by_executors[own.executors]
        sizes = sorted(times.ms_by_batch)
        axes.plot(
            sizes, [times.ms_by_batch[size] for size in sizes],
            color=colour, marker=marker, markersize=5, linestyle="none",
            label=f"{label}: {times.batch_ms:.3g} + {times.request_ms:.3g} n",
        )  # fmt: skip
        ends = np.array([0, max(times.most, sizes[min(1, len(sizes) - 1)])])
        axes.plot(ends, times.batch_ms + times.request_ms * ends, color=colour, linewidth=1.6)
    axes.set_xlabel("requests in a batch, n")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms a batch")
    axes.legend(frameon=False, title=_titled(profile, "B + K n, ms"))
    return figure


def draw_memory(profile: CoeProfile, kind: str) -> Figure:
    """Fig. 6: bytes of intermediates against batch size, beside those of the weights."""
    own = profile.kinds[kind]
    figure, axes = _one(f"{profile.collaboration}: memory of a batch on {kind}")
    for key, label, colour, marker, costs in _architectures(profile, own):
        sizes = sorted(costs.bytes_by_batch)
        axes.plot(
            sizes, [costs.bytes_by_batch[size] / MIB for size in sizes],
            color=colour, marker=marker, markersize=5, linewidth=1.6, label=label,
        )  # fmt: skip
        axes.axhline(profile.architectures[key].record_bytes / MIB, color=colour, linestyle=":", linewidth=1.2)
    axes.plot([], [], color="black", linestyle=":", linewidth=1.2, label="weights of an expert")
    _by_batch(axes, {size for costs in own.architectures.values() for size in costs.bytes_by_batch})
    axes.set_ylabel("intermediates, MiB")
    axes.legend(frameon=False, title=_titled(profile, ""))
    return figure


def draw_usage(profile: CoeProfile, kind: str) -> Figure:
    """Fig. 11: the share of uses that the most probable experts have, and the window that was found."""
    own = profile.kinds[kind]
    trial = own.trials[own.executors]
    figure, axes = _one(f"{profile.collaboration}: which share of uses the most probable experts have")
    usage = np.sort(np.array(list(profile.usage.values())))[::-1]
    shares = np.concatenate([[0.0], np.cumsum(usage) / max(usage.sum(), 1e-12)])
    experts = len(usage)
    axes.axvspan(*trial.window, color=COLOURS[4], alpha=0.25, linewidth=0, label="window {}–{}".format(*trial.window))
    axes.axvline(trial.residents, color=COLOURS[1], linestyle="--", linewidth=1.4, label=f"chosen: {trial.residents}")
    axes.plot(range(experts + 1), 100 * shares, color=COLOURS[0], linewidth=2, label="this collaboration")
    axes.plot([0, experts], [0, 100], color="0.5", linewidth=1.2, label="all alike (linear)")
    axes.plot([0, 0, experts], [0, 100, 100], color="0.5", linestyle="-.", linewidth=1.2, label="one alone (step)")
    axes.set_xlabel("experts, the most probable first")
    axes.set_ylabel("share of uses, %")
    axes.set_xlim(0, experts)
    axes.set_ylim(0, 103)
    axes.legend(frameon=False, loc="lower right")
    return figure


def draw_trials(profile: CoeProfile, kind: str) -> Figure:
    """Figs 17 and 18: replayed requests a second against executors, and against experts in memory."""
    own = profile.kinds[kind]
    trial = own.trials[own.executors]
    figure = _figure(9.6, f"{profile.collaboration}: requests a second, replayed with --scheduling {own.scheduling}")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.8))
    counts = sorted(own.trials)
    colours = [COLOURS[1] if count == own.executors else COLOURS[0] for count in counts]
    places = range(len(counts))
    left.bar(places, [own.trials[count].per_s for count in counts], color=colours, width=0.6)
    left.set_xticks(places, [str(count) for count in counts])
    left.set_xlabel("executors")
    left.set_ylabel("requests a second")
    tried = sorted(trial.per_s_by_residents)
    right.axvspan(*trial.window, color=COLOURS[4], alpha=0.25, linewidth=0, label="window {}–{}".format(*trial.window))
    right.plot(
        tried, [trial.per_s_by_residents[number] for number in tried], color=COLOURS[0], marker="o", markersize=5
    )
    for number, colour, label in (
        (trial.drawn, COLOURS[2], f"drawn: {trial.drawn}"),
        (trial.residents, COLOURS[1], f"chosen: {trial.residents}"),
    ):
        right.plot(
            [number], [trial.per_s_by_residents[number]],
            color=colour, marker="o", markersize=13, markerfacecolor="none", markeredgewidth=1.8, linestyle="none",
            label=label,
        )  # fmt: skip
    right.set_xlabel(f"experts in memory, {own.executors} executor{'' if own.executors == 1 else 's'}")
    if trial.served_per_s:
        served = sorted(trial.served_per_s)
        right.plot(
            served, [trial.served_per_s[number] for number in served],
            color=COLOURS[3], marker="X", markersize=8, linestyle="none", label="really served",
        )  # fmt: skip
    right.set_ylim(0, 1.12 * max(*trial.per_s_by_residents.values(), *trial.served_per_s.values(), trial.per_s))
    right.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        _plain(axes)
    return figure


def _architectures(
    profile: CoeProfile, own: ExecutorsProfile
) -> Iterator[tuple[str, str, str, str, ArchitectureCosts]]:
    """Key, label, colour, marker and costs of those that are shown: the most used ones, in the order of the file."""
    labels, used = labels_of(profile), dict.fromkeys(profile.architectures, 0.0)
    for name, key in profile.experts.items():
        used[key] += profile.usage.get(name, 0.0)
    shown = sorted(labels, key=lambda key: -used[key])[:_MOST_SHOWN]
    for place, key in enumerate(key for key in labels if key in shown):
        yield key, labels[key], COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)], own.architectures[key]


def _titled(profile: CoeProfile, title: str) -> str:
    """A legend's title, which says what is left out."""
    many = len(labels_of(profile))
    return title if many <= _MOST_SHOWN else f"{title}\n{_MOST_SHOWN} of {many} architectures, the most used"


def _with(own: ExecutorsProfile, kind: str) -> str:
    return f"{kind}, one executor alone" if own.executors == 1 else f"{kind}, {own.executors} executors side by side"


def _by_batch(axes: Axes, sizes: set[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(sizes), [str(size) for size in sorted(sizes)])
    axes.set_xlabel("requests in a batch")
    axes.set_ylim(bottom=0)


def _one(title: str) -> tuple[Figure, Axes]:
    figure = _figure(6.8, title)
    axes = figure.subplots()
    _plain(axes)
    return figure, axes


def _figure(width: float, title: str) -> Figure:
    figure = new_figure(width, 4.3)
    figure.suptitle(title, fontsize=12, x=0.02, horizontalalignment="left")
    return figure


def _plain(axes: Axes) -> None:
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
