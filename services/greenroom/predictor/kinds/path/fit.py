"""The weights of a token's path out of recorded routing: logistic regressions a layer, fitted with Adam.

The sum over a token's earlier picks is what DuoServe-MoE's input (its §4, Eqs 4 and 5) holds about the token, used by
a linear model. What ``reuse`` knows of the token's sequence enters as one more term.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.path_file import LAYERS_AHEAD, PathFile, targets_of, weights_of
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.policies.base.array_types import Counts
from greenroom.policies.reuse.chances import Array
from greenroom.predictor.kinds.adam import Adam
from greenroom.predictor.kinds.fit_time import FitTime
from greenroom.predictor.kinds.reuse.fit import layer_samples, most_tokens
from greenroom.replay.traces.held_out import sequences_to_learn_from
from greenroom.replay.traces.routing_trace import RoutingTrace

MOST_BYTES: Final = 64 * MIB
"""What the weights may take at half precision."""
LEAST_TOKENS: Final = 500
"""Fewer say less of a pair of experts than chance does."""

_LEAST = 1e-4
_WINDOW_LAYERS = 4
_SEARCH = 0.3
"""Of the time, where there is a limit: looking for the window."""
_NEARLY = 0.005
"""By this share the loss on what is held out may be above the least."""

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class FitOptions:
    """``rounds`` over all tokens, in batches of ``batch``, in an order drawn by ``seed``; more rounds where that makes
    fewer than ``steps`` batches. ``held_out``: the share of the sequences that are not learnt from, the last ones, at
    least one. ``window``: how many earlier layers count; None
    takes the shortest one whose loss on these is near the least. ``seconds``: in which all of it is to be done, layers
    for which time runs short with less learnt; None: as long as it takes.
    """

    rounds: int = 6
    batch: int = 512
    steps: int = 1000
    learning_rate: float = 5e-3
    held_out: float = 0.1
    window: int | None = None
    seed: int = 0
    seconds: float | None = None


def fit(
    trace: RoutingTrace,
    reuse: ReuseFile,
    options: FitOptions | None = None,
    *,
    on_layer: Callable[[int], object] = lambda _: None,
) -> PathFile:
    """``reuse`` says what is known of each token's sequence. ``on_layer`` is called when a layer is done, with how many
    are. Raises InvalidConfig where there is too little to learn from, or ``reuse`` is another model's.
    """
    began, options = time.monotonic(), options or FitOptions()
    if reuse.experts_per_layer != tuple(trace.experts_per_layer.tolist()):
        raise InvalidConfig("reuse", reuse.shape, f"coefficients of the traced model, {trace.layers} layers")
    first = int(np.searchsorted(trace.seq_starts, trace.tokens - most_tokens(trace)))
    trace = trace.part(min(first, _last_sequences(trace)))
    learnt_rows = int(trace.seq_starts[sequences_to_learn_from(trace, options.held_out, least=LEAST_TOKENS)])
    samples = _Samples(trace, learnt_rows)
    widths = tuple(trace.experts_per_layer.tolist())
    window = options.window or _window(samples, reuse, options)
    left = None if options.seconds is None else options.seconds - (time.monotonic() - began)
    time_left = FitTime(left, sum(_weight(target, ahead, window) for target, ahead in _parts(trace.layers)))
    if not 1 <= window <= trace.layers:
        raise InvalidConfig("window", window, f"from 1 to {trace.layers} layers")
    pairs: list[list[Array]] = [[] for _ in widths]  # by source layer, in the order of ``targets_of``
    bias = np.zeros((LAYERS_AHEAD, sum(widths)), dtype=np.float32)
    sequence = np.zeros((LAYERS_AHEAD, trace.layers), dtype=np.float32)
    found: dict[tuple[int, int], _Layer] = {}
    losses: dict[int, list[float]] = {ahead: [] for ahead in range(1, LAYERS_AHEAD + 1)}
    first_key = np.concatenate(([0], np.cumsum(widths)))
    for target in range(trace.layers):
        known = sequence_logits(trace, target, reuse)
        for ahead in range(1, LAYERS_AHEAD + 1):
            layer = found[ahead, target] = _fitted(samples, target, ahead, window, known, options, time_left)
            bias[ahead - 1, first_key[target] : first_key[target + 1]] = layer.bias
            sequence[ahead - 1, target] = layer.sequence[0]
            losses[ahead].append(layer.loss)
        on_layer(target + 1)
    for source in range(trace.layers):
        for ahead in range(1, LAYERS_AHEAD + 1):
            pairs[source] += [
                found[ahead, target].pairs[source] for target in targets_of(source, ahead, window, trace.layers)
            ]
    parts = [np.concatenate(part, axis=1).ravel() for part in pairs if part]
    return PathFile(
        model=trace.model,
        experts_per_layer=widths,
        sequences=trace.sequences,
        window=np.array([window], dtype=np.float32),
        weights=np.concatenate([*parts, np.zeros(0, np.float32)]).astype(np.float16),
        bias=bias,
        sequence=sequence,
        report={
            "tokens": learnt_rows,
            "held_out_tokens": trace.tokens - learnt_rows,
            "window": window,
            "held_out_loss": [round(float(np.mean(losses[ahead])), 5) for ahead in losses],
            "seconds": round(time.monotonic() - began, 1),
        },
    )


class _Samples:
    """Rows of a trace as what is learnt from and what is held out."""

    def __init__(self, trace: RoutingTrace, learnt_rows: int) -> None:
        self.trace = trace
        self.widths: Sequence[int] = trace.experts_per_layer.tolist()
        self.learnt_rows = learnt_rows

    def picked(self, rows: Rows, layer: int) -> Array:
        """``[rows, experts of the layer]``: 1 where the row was routed."""
        width = self.widths[layer]
        picks = np.minimum(self.trace.experts[rows, layer].astype(np.intp), width)
        found = np.zeros((len(rows), width + 1), dtype=np.float32)
        np.put_along_axis(found, picks, 1, axis=1)
        return found[:, :width]

    def path(self, rows: Rows, layers: Sequence[int]) -> Array:
        """``[rows, experts of all these layers]``."""
        parts = [self.picked(rows, layer) for layer in layers]
        return np.concatenate(parts, axis=1) if parts else np.zeros((len(rows), 0), dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class KnownOfSequences:
    """What a token's sequence says of it: ``logits[n, E]`` for the trace's rows ``rows[n]``, ascending."""

    rows: Counts
    logits: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """``pairs[source] [E_source, E]``, ``bias[E]``, ``sequence[1]``; ``loss``: log loss an expert, held out."""

    pairs: dict[int, Array]
    bias: Array
    sequence: Array
    loss: float


def sequence_logits(trace: RoutingTrace, layer: int, reuse: ReuseFile) -> KnownOfSequences:
    """The logit of what ``reuse`` expects of each token, but for the first of a sequence."""
    samples = layer_samples(trace, layer)
    widths = reuse.experts_per_layer
    span = slice(sum(widths[:layer]), sum(widths[: layer + 1]))
    logits: Array = np.einsum("nre,r->ne", samples.logits, reuse.weights[layer]) + reuse.bias[span]
    if len(reuse.followers):
        place, width = 2 * sum(one * one for one in widths[:layer]), widths[layer]
        logits += samples.recent.astype(np.float32) @ reuse.followers[place : place + 2 * width * width].reshape(
            2 * width, width
        )
    bound = float(np.log((1 - _LEAST) / _LEAST))
    return KnownOfSequences(samples.follow_row, np.clip(logits, -bound, bound))


def _last_sequences(trace: RoutingTrace) -> int:
    """From which sequence on there are two with tokens: one is learnt from, and one held out."""
    recorded = np.flatnonzero(np.diff(trace.seq_starts))
    return int(recorded[-2]) if len(recorded) > 1 else 0


def _parts(layers: int) -> list[tuple[int, int]]:
    return [(target, ahead) for target in range(layers) for ahead in range(1, LAYERS_AHEAD + 1)]


def _weight(target: int, ahead: int, window: int) -> int:
    """What fitting takes grows with the layers that are looked at."""
    return 1 + max(0, min(window, target - ahead + 1))


def _fitted(
    samples: _Samples,
    target: int,
    ahead: int,
    window: int,
    known: KnownOfSequences,
    options: FitOptions,
    time_left: FitTime,
) -> _Layer:
    time_left.begin(_weight(target, ahead, window))
    sources = [layer for layer in range(target) if target in targets_of(layer, ahead, window, target + 1)]
    split = int(np.searchsorted(known.rows, samples.learnt_rows))
    width = samples.widths[target]
    pairs: Array = np.zeros((sum(samples.widths[source] for source in sources), width), dtype=np.float32)
    bias: Array = np.zeros(width, dtype=np.float32)
    sequence: Array = np.ones(1, dtype=np.float32)
    logits = known.logits
    adam = Adam([pairs, bias, sequence], options.learning_rate)
    rng = np.random.default_rng(options.seed)

    def chances(places: Rows, path: Array) -> Array:
        found: Array = path @ pairs
        found += bias + sequence * logits[places]
        np.negative(found, out=found)
        np.exp(found, out=found)
        found += 1
        return np.reciprocal(found, out=found)

    rounds = max(options.rounds, -(-options.steps * options.batch // max(split, 1)))
    for number in range(rounds):
        if number == rounds - max(1, rounds // 6):
            adam.rate *= 0.3  # to settle
        for some in _batches(rng.permutation(split), options.batch):
            if time_left.is_up:
                break
            path = samples.path(known.rows[some], sources)
            wrong = (chances(some, path) - samples.picked(known.rows[some], target)) / np.float32(len(some))
            adam.step([path.T @ wrong, wrong.sum(axis=0), (wrong * logits[some]).sum(keepdims=True)[0]])
    total = 0.0
    for some in _batches(np.arange(split, len(known.rows)), 4096):
        expected = np.clip(chances(some, samples.path(known.rows[some], sources)), _LEAST, 1 - _LEAST)
        total -= float(np.log(np.where(samples.picked(known.rows[some], target) > 0, expected, 1 - expected)).sum())
    loss = total / max(1, (len(known.rows) - split) * width)
    starts = np.cumsum([0, *(samples.widths[source] for source in sources)]).tolist()
    by_source = {source: pairs[begin:end] for source, begin, end in zip(sources, starts, starts[1:], strict=False)}
    return _Layer(by_source, bias, sequence, loss)


def _batches(rows: Rows, size: int) -> Iterator[Rows]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def _window(samples: _Samples, reuse: ReuseFile, options: FitOptions) -> int:
    """The shortest window that foresees nearly as well as the best one, judged on a few layers."""
    layers = len(samples.widths)
    probes = np.unique(np.linspace(layers / 3, layers - 1, _WINDOW_LAYERS).round().astype(int)).tolist()
    known = {target: sequence_logits(samples.trace, target, reuse) for target in probes}
    windows = [1]
    while (window := 2 * windows[-1]) < 2 * layers - 2 and 2 * weights_of(samples.widths, window) <= MOST_BYTES:
        windows.append(window)
    weights = sum(_weight(target, 1, window) for window in windows for target in probes)
    time_left = FitTime(None if options.seconds is None else _SEARCH * options.seconds, weights)
    losses = {
        window: float(
            np.mean([_fitted(samples, target, 1, window, known[target], options, time_left).loss for target in probes])
        )
        for window in windows
    }
    least = min(losses.values()) * (1 + _NEARLY)
    return min(min(window, layers) for window, loss in losses.items() if loss <= least)
