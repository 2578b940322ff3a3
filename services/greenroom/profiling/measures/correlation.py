"""How well the experts of one layer or prompt predict those of the next: eMoE's observations, from a routing trace.

Sections 2.2.1 (Fig. 3), 3.2.2 (Figs 7 and 8) and 3.3 (Fig. 9). Beside each figure stands its value without any
correlation: that of the same picks in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.replay.traces.routing_trace import RoutingTrace

Floats = NDArray[np.float64]
Order = NDArray[np.int64]

ALL = "all"
LAGS = 20
MOST_TASKS = 6
"""So many tasks, those with the most tokens, have pictures of their own."""
_DRAWS = 20
_MOST_TOKENS = 200_000
"""The most tokens that figures by single tokens use."""
_ROWS_AT_ONCE = 50_000
_FEWEST_PAIRS = 10


@dataclass(frozen=True, slots=True, eq=False)
class LayerCorrelation:
    """Between each layer and the next; arrays [layers - 1].

    ``by_number``: the normalised cross-correlation at lag 0 of a prompt's picks by expert number in the two layers,
    mean over prompts. ``numbers_low`` to ``numbers_high``: 5th to 95th percentile of the same when the next layer's
    experts are numbered another way: numbers mean nothing across layers. ``by_follower``: how strongly a token's being
    routed to an expert correlates with its being routed to the one of the next layer that follows it most reliably,
    mean over experts by use; numbers make no difference to it. ``followers_shuffled``: the same with each token's next
    layer taken from another token.
    """

    by_number: Floats
    numbers_low: Floats
    numbers_high: Floats
    by_follower: Floats
    followers_shuffled: Floats


@dataclass(frozen=True, slots=True, eq=False)
class PromptCorrelation:
    """Between prompts: the normalised cross-correlation at lag 0 of their picks by expert, mean over layers.

    ``consecutive[i]``: of prompt i and the next. Then arrays [lags], of prompts that are 1, 2, … apart: ``mean``, its
    ``low`` and ``high`` (10th and 90th percentile over pairs), ``same_task`` and ``other_task`` (NaN where there are
    hardly such pairs). ``shuffled``: the mean over all pairs of prompts, which is what any order gives on average;
    ``shuffled_low`` to ``shuffled_high``: 5th to 95th percentile of ``mean[0]`` over shuffled orders. ``of_one_task``
    and ``of_two_tasks``: the means over all pairs of prompts, however far apart.
    """

    consecutive: Floats
    mean: Floats
    low: Floats
    high: Floats
    same_task: Floats
    other_task: Floats
    shuffled: float
    shuffled_low: float
    shuffled_high: float
    of_one_task: float
    of_two_tasks: float


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """``transitions[task][l, a, b]``: how often a token of the task was routed to expert a in layer l and to b in the
    next. ``layers`` and ``prompts`` are None where the trace has too few of them. ``layer_ids``: layers' numbers in the
    model."""

    transitions: Mapping[str, Floats]
    layers: LayerCorrelation | None
    prompts: PromptCorrelation | None
    layer_ids: tuple[int, ...]
    sequences: int
    tokens: int

    def report(self) -> dict[str, Any]:
        """The figures, as JSON takes them."""
        found: dict[str, Any] = {"prompts": self.sequences, "tokens": self.tokens, "layers": len(self.layer_ids)}
        if (layers := self.layers) is not None:
            found["consecutive_layers"] = {
                "by_number": _numbers(layers.by_number),
                "by_number_renumbered_5_to_95": [
                    round(float(layers.numbers_low.mean()), 4),
                    round(float(layers.numbers_high.mean()), 4),
                ],
                "by_follower": _numbers(layers.by_follower),
                "by_follower_shuffled": _numbers(layers.followers_shuffled),
            }
        if (prompts := self.prompts) is not None:
            found["consecutive_prompts"] = {
                "mean": round(float(prompts.consecutive.mean()), 4),
                "by_lag": _numbers(prompts.mean),
                "same_task_by_lag": _numbers(prompts.same_task),
                "other_task_by_lag": _numbers(prompts.other_task),
                "of_one_task_and_of_two": _numbers([prompts.of_one_task, prompts.of_two_tasks]),
                "shuffled": round(prompts.shuffled, 4),
                "shuffled_5_to_95": _numbers([prompts.shuffled_low, prompts.shuffled_high]),
            }
        return found


def observe(trace: RoutingTrace, *, tasks: Sequence[str] | None = None, seed: int = 0) -> Observations:
    """All observations of a trace.

    ``tasks``: that of each sequence (None: the trace's own, if it names any). Prompts follow each other in the order of
    arrival, else of the trace. Raises InvalidConfig where there is not one task a sequence.
    """
    tasks = tasks if tasks is not None else trace.task
    if tasks is not None and len(tasks) != trace.sequences:
        raise InvalidConfig("tasks", len(tasks), f"the task type of each of the {trace.sequences} sequences")
    if tasks is not None and not any(tasks):
        tasks = None  # recorded without any
    return Observations(
        transitions=transitions_by_task(trace, tasks),
        layers=between_layers(trace, seed=seed) if trace.layers > 1 and trace.tokens > 1 else None,
        prompts=between_prompts(trace, tasks, seed=seed),
        layer_ids=tuple(range(trace.layers) if trace.layer_ids is None else (int(one) for one in trace.layer_ids)),
        sequences=trace.sequences,
        tokens=trace.tokens,
    )


def transitions_by_task(trace: RoutingTrace, tasks: Sequence[str] | None) -> dict[str, Floats]:
    """[layers - 1, experts, experts] by task, of those with the most tokens; of all together without tasks (Fig. 3).

    A token that is routed to k experts in both layers counts for each of the k · k pairs.
    """
    lengths = np.diff(trace.seq_starts)
    if tasks is None:
        of_row = np.zeros(trace.tokens, dtype=np.int64)
        names = [ALL]
    else:
        tokens: Counter[str] = Counter()
        for task, length in zip(tasks, lengths.tolist(), strict=True):
            tokens[task] += length
        names = [
            name for name, count in sorted(tokens.items(), key=lambda one: (-one[1], one[0]))[:MOST_TASKS] if count
        ]
        numbers = {name: number for number, name in enumerate(names)}
        of_row = np.repeat(np.array([numbers.get(task, -1) for task in tasks], dtype=np.int64), lengths)
    found: dict[str, Floats] = {}
    for number, name in enumerate(names):
        rows = np.flatnonzero(of_row == number)
        if trace.layers > 1 and len(rows):
            found[name] = np.stack([_pairs(trace, layer, rows) for layer in range(trace.layers - 1)])
    return found


def between_layers(trace: RoutingTrace, *, seed: int = 0) -> LayerCorrelation:
    """Fig. 7. The trace has at least two layers and two tokens."""
    choose = np.random.default_rng(seed)
    counts = picks_by_prompt(trace)[np.diff(trace.seq_starts) > 0]
    rows = np.arange(trace.tokens)
    if trace.tokens > _MOST_TOKENS:
        rows = np.sort(choose.choice(trace.tokens, _MOST_TOKENS, replace=False))
    columns: list[tuple[float, ...]] = []
    width = counts.shape[2]
    for layer in range(trace.layers - 1):
        now, following = _unit(counts[:, layer]), _unit(counts[:, layer + 1])
        orders = (np.arange(width), *(choose.permutation(width) for _ in range(_DRAWS)))
        by_number, *renumbered = (float((now * following[:, order]).sum(axis=1).mean()) for order in orders)
        here, there = _used(trace, layer, rows), _used(trace, layer + 1, rows)
        columns.append(
            (
                by_number,
                float(np.percentile(renumbered, 5)),
                float(np.percentile(renumbered, 95)),
                _best_follower(here, there),
                _best_follower(here, there[choose.permutation(len(there))]),
            )
        )
    return LayerCorrelation(*np.array(columns).T)


def between_prompts(
    trace: RoutingTrace, tasks: Sequence[str] | None = None, *, lags: int = LAGS, seed: int = 0
) -> PromptCorrelation | None:
    """Figs 8 and 9; None with fewer than two prompts."""
    order = _in_order(trace)
    if len(order) < 2:
        return None
    of_all = correlation_of_all(picks_by_prompt(trace)[order])
    prompts = len(of_all)
    kinds = np.unique(np.array(tasks if tasks is not None else [ALL] * trace.sequences)[order], return_inverse=True)[1]
    columns: list[tuple[float, ...]] = []
    apart = ~np.eye(prompts, dtype=np.bool_)
    alike = kinds[:, None] == kinds[None, :]
    for lag in range(1, min(lags, prompts - 1) + 1):
        pairs = np.diagonal(of_all, lag)
        same = kinds[lag:] == kinds[:-lag]
        columns.append(
            (
                float(pairs.mean()),
                float(np.percentile(pairs, 10)),
                float(np.percentile(pairs, 90)),
                _mean(pairs[same]),
                _mean(pairs[~same]),
            )
        )
    choose = np.random.default_rng(seed)
    draws = []
    for _ in range(10 * _DRAWS):
        other = choose.permutation(prompts)
        draws.append(float(of_all[other[:-1], other[1:]].mean()))
    mean, low, high, same_task, other_task = np.array(columns).T
    return PromptCorrelation(
        consecutive=np.diagonal(of_all, 1).copy(),
        mean=mean,
        low=low,
        high=high,
        same_task=same_task,
        other_task=other_task,
        shuffled=float((of_all.sum() - np.trace(of_all)) / (prompts * (prompts - 1))),
        shuffled_low=float(np.percentile(draws, 5)),
        shuffled_high=float(np.percentile(draws, 95)),
        of_one_task=_mean(of_all[alike & apart]),
        of_two_tasks=_mean(of_all[~alike]),
    )


def picks_by_prompt(trace: RoutingTrace) -> Floats:
    """[sequences, layers, experts]: how many of a prompt's picks in a layer were of each expert."""
    width = int(trace.experts_per_layer.max())
    of_row = np.repeat(np.arange(trace.sequences), np.diff(trace.seq_starts))
    counts = np.zeros((trace.sequences, trace.layers, width))
    for layer in range(trace.layers):
        picks = trace.experts[:, layer].astype(np.int64)
        real = picks < width
        cells = (of_row[:, None] * width + picks)[real]
        counts[:, layer] = np.bincount(cells, minlength=trace.sequences * width).reshape(trace.sequences, width)
    return counts


def correlation_of_all(counts: Floats) -> Floats:
    """[prompts, prompts] of [prompts, layers, experts]: normalised cross-correlation at lag 0, mean over layers.

    Of the deviations from the mean over experts, so it is Pearson's coefficient: without taking the mean off, counts,
    which are never negative, would correlate whatever they are. 0 where one of the two is the same for all experts.
    """
    found = np.zeros((len(counts), len(counts)))
    for layer in range(counts.shape[1]):
        unit = _unit(counts[:, layer])
        found += unit @ unit.T
    found /= counts.shape[1]
    return found


def _unit(counts: NDArray[Any]) -> NDArray[Any]:
    """Deviations from the mean over experts, of length 1; zeros where all are alike."""
    apart = counts - counts.mean(axis=-1, keepdims=True)
    length = np.linalg.norm(apart, axis=-1, keepdims=True)
    unit: NDArray[Any] = np.zeros_like(apart)
    np.divide(apart, length, out=unit, where=length > 1e-9 * (1 + np.abs(counts).max(initial=0)))
    return unit


def _used(trace: RoutingTrace, layer: int, rows: Order) -> NDArray[np.float32]:
    """[rows, experts]: 1 where the row was routed to the expert."""
    width = int(trace.experts_per_layer.max())
    picks = trace.experts[rows, layer].astype(np.int64)
    used = np.zeros((len(rows), width + 1), dtype=np.float32)
    np.put_along_axis(used, np.minimum(picks, width), 1.0, axis=1)  # no pick falls into the column that is cut off
    return used[:, :width]


def _pairs(trace: RoutingTrace, layer: int, rows: Order) -> Floats:
    """[experts, experts]: how many rows were routed to one in the layer and to the other in the next."""
    width = int(trace.experts_per_layer.max())
    found = np.zeros((width, width))
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        found += _used(trace, layer, part).T @ _used(trace, layer + 1, part)
    return found


def _best_follower(here: NDArray[np.float32], there: NDArray[np.float32]) -> float:
    """The correlation of each expert with the one that follows it most reliably, mean by how often it is used."""
    use, next_use = (flags.mean(axis=0, dtype=np.float64) for flags in (here, there))
    together = (here.T @ there).astype(np.float64) / len(here) - np.outer(use, next_use)
    spread = np.sqrt(np.outer(use * (1 - use), next_use * (1 - next_use)))
    both = np.divide(together, spread, out=np.zeros_like(together), where=spread > 0)
    return float((both.max(axis=1) * use).sum() / max(1e-12, use.sum()))


def _in_order(trace: RoutingTrace) -> Order:
    """The sequences that have rows, as they arrived."""
    order = np.arange(trace.sequences) if trace.arrival is None else np.argsort(trace.arrival, kind="stable")
    return order[np.diff(trace.seq_starts)[order] > 0]


def _mean(pairs: Floats) -> float:
    """NaN where there are too few to tell."""
    return float(pairs.mean()) if len(pairs) >= _FEWEST_PAIRS else float("nan")


def _numbers(values: Iterable[float]) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 4) for value in values]
