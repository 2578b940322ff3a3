"""The coefficients of the policy reuse out of recorded routing: a logistic regression a layer, fitted with Adam."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Counts, Mask
from greenroom.policies.reuse.chances import KEEP_OVER_ALL, LAST_TOKENS, NEVER, Array, logit
from greenroom.predictor.kinds.adam import Adam
from greenroom.predictor.kinds.fit_time import FitTime
from greenroom.replay.traces.routing_trace import RoutingTrace

KEEP: Final = (0.5, 0.8, 0.92, 0.97, 0.99)
"""What the averages keep at a token: from the last two tokens to the last hundred."""
MOST_TOKENS: Final = 50_000
"""Tokens that are learnt from, in whole sequences, the last ones, at least one. More take longer and tell little."""
_MOST_LOGITS: Final = 128 * MOST_TOKENS
"""Of a layer and one average. With more than 128 experts fewer tokens are learnt from, so that memory is bounded."""
_LEAST_TOKENS: Final = 32
_CHUNK: Final = 64
"""Tokens whose averages are one matrix product."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """``rounds``: over all tokens, in batches of ``batch``, in an order drawn by ``seed``; more rounds where that makes
    fewer than ``steps`` batches. ``followers``: whether to learn which expert follows which; None: if the sequences
    held out say that this is worth its coefficients. ``held_out``: the share of the sequences that are not learnt
    from, the last ones, at least one. Of a single sequence it is the last tokens. ``seconds``: in which all of it is to
    be done, layers for which time runs short with less learnt; None: as long as it takes.
    """

    rounds: int = 6
    batch: int = 512
    steps: int = 400
    learning_rate: float = 2e-3
    held_out: float = 0.1
    followers: bool | None = None
    seed: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerSamples:
    """A layer's tokens, without the last one of each sequence. Rows that do not run in the layer, as in an encoder's
    layer while a sequence decodes, are left out.

    ``logits[n, R + 1, E]``: of the sequence's averages after the token, and of the one over all; ``recent[n, 2 E]``:
    the picks of it and of the one before; ``follow[n, E]``: of the one after; ``sequence[n]``; ``follow_row[n]``: the
    trace's row of the token after.
    """

    logits: Array
    recent: Mask
    follow: Mask
    sequence: Counts
    follow_row: Counts

    def __len__(self) -> int:
        return len(self.follow)

    def split(self, sequences: int, share: float) -> tuple[LayerSamples, LayerSamples]:
        """Those of the first ``sequences``, and the others. With 0 ``sequences``: the first ``share``, and the rest."""
        at = int(np.searchsorted(self.sequence, sequences)) if sequences else int(len(self) * share)
        return self._part(slice(at)), self._part(slice(at, None))

    def _part(self, rows: slice) -> LayerSamples:
        return LayerSamples(
            self.logits[rows], self.recent[rows], self.follow[rows], self.sequence[rows], self.follow_row[rows]
        )


def fit(
    trace: RoutingTrace, options: FitOptions | None = None, *, on_layer: Callable[[int], object] = lambda _: None
) -> ReuseFile:
    """``on_layer`` is called when a layer is done, with how many are. Raises InvalidConfig where there is too little
    to learn from.
    """
    began, options = time.monotonic(), options or FitOptions()
    first = int(np.searchsorted(trace.seq_starts, trace.tokens - most_tokens(trace)))
    trace = trace.part(max(0, min(first, trace.sequences - 1)))
    lengths = np.diff(trace.seq_starts)
    of_sequence = np.maximum(lengths - 1, 0)
    learnt_sequences, share = len(lengths) - max(1, round(len(lengths) * options.held_out)), 1 - options.held_out
    samples = int(of_sequence.sum())
    learnt = int(of_sequence[:learnt_sequences].sum()) if learnt_sequences > 0 else int(samples * share)
    if min(learnt, samples - learnt) < _LEAST_TOKENS:
        allowed = f"at least {_LEAST_TOKENS} tokens to learn from, and as many in the {options.held_out:.0%} held out"
        raise InvalidConfig("trace", f"{learnt} and {samples - learnt} tokens", allowed)
    plain, full = [], []
    time_left = FitTime(options.seconds, trace.layers * (2 if options.followers is None else 1))
    for layer in range(trace.layers):
        parts = layer_samples(trace, layer).split(learnt_sequences, share)
        if options.followers is not True:
            plain.append(_fitted(*parts, options, time_left, followers=False))
        if options.followers is not False:
            full.append(_fitted(*parts, options, time_left, followers=True))
        on_layer(layer + 1)
    losses = {
        name: float(np.mean([layer.loss for layer in layers]))
        for name, layers in (("averages", plain), ("followers", full))
        if layers
    }
    best = min(losses, key=lambda name: losses[name])
    chosen = plain if best == "averages" else full
    return ReuseFile(
        model=trace.model,
        experts_per_layer=tuple(trace.experts_per_layer.tolist()),
        sequences=trace.sequences,
        keep=np.array(KEEP, dtype=np.float32),
        weights=np.stack([layer.weights for layer in chosen]),
        bias=np.concatenate([layer.bias for layer in chosen]),
        followers=np.concatenate([layer.followers.ravel() for layer in chosen]),
        report={
            "tokens": learnt,
            "held_out_tokens": samples - learnt,
            "held_out_loss": {name: round(loss, 5) for name, loss in losses.items()},
            "uses": best,
            "seconds": round(time.monotonic() - began, 1),
        },
    )


def most_tokens(trace: RoutingTrace) -> int:
    """How many are learnt from."""
    return min(MOST_TOKENS, _MOST_LOGITS // int(trace.experts_per_layer.max()))


def layer_samples(trace: RoutingTrace, layer: int) -> LayerSamples:
    """What the policy would have known after each token, one sequence after the other."""
    width = int(trace.experts_per_layer[layer])
    picks = np.minimum(trace.experts[:, layer].astype(np.intp), width)
    tokens: Array = np.zeros((trace.tokens, width + 1), dtype=np.float32)
    np.put_along_axis(tokens, picks, 1, axis=1)
    tokens = tokens[:, :width]
    routed = tokens.any(axis=1)
    tokens, row_of = tokens[routed], np.flatnonzero(routed)
    starts = np.concatenate(([0], np.cumsum(routed)))[trace.seq_starts]
    prior = np.full(width, tokens.sum() / max(len(tokens), 1) / width, dtype=np.float32)
    over_all = np.concatenate((prior[None], moving(tokens, prior, KEEP_OVER_ALL)))
    of_sequence = np.maximum(np.diff(starts) - 1, 0)
    count = int(of_sequence.sum())
    logits: Array = np.empty((count, len(KEEP) + 1, width), dtype=np.float32)
    recent = np.zeros((count, 2 * width), dtype=np.bool_)
    follow = np.empty((count, width), dtype=np.bool_)
    follow_row = np.empty(count, dtype=row_of.dtype)
    at = 0
    for begin, end in pairwise(starts.tolist()):
        if end - begin < 2:
            continue
        own, here = tokens[begin:end], slice(at, at := at + end - begin - 1)
        for number, keep in enumerate(KEEP):
            logits[here, number] = logit(moving(own[:-1], over_all[begin], keep))
        logits[here, -1] = logit(over_all[begin + 1 : end])
        recent[here, :width] = own[:-1]
        recent[here, width:][1:] = own[:-2]
        follow[here], follow_row[here] = own[1:], row_of[begin + 1 : end]
    return LayerSamples(logits, recent, follow, np.repeat(np.arange(trace.sequences), of_sequence), follow_row)


def moving(tokens: Array, start: Array, keep: float) -> Array:
    """``[T, E]``: the moving average after each of ``tokens[T, E]``, from ``start[E]`` on."""
    found = np.empty_like(tokens)
    ages = np.arange(_CHUNK)
    apart = ages[:, None] - ages
    mixed = np.where(apart >= 0, (1 - keep) * keep ** np.maximum(apart, 0), 0).astype(np.float32)
    for begin in range(0, len(tokens), _CHUNK):
        chunk = tokens[begin : begin + _CHUNK]
        size = len(chunk)
        found[begin : begin + size] = mixed[:size, :size] @ chunk
        found[begin : begin + size] += np.power(keep, ages[:size] + 1).astype(np.float32)[:, None] * start
        start = found[begin + size - 1]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """``weights[R + 1]``, ``bias[E]``, ``followers[2 E, E]`` or empty; ``loss``: log loss an expert, held out."""

    weights: Array
    bias: Array
    followers: Array
    loss: float


def _fitted(
    learnt: LayerSamples, held_out: LayerSamples, options: FitOptions, time_left: FitTime, *, followers: bool
) -> _Layer:
    time_left.begin()
    width = learnt.follow.shape[1]
    weights = np.array([*[1 / len(KEEP)] * len(KEEP), 0], dtype=np.float32)
    bias = np.zeros(width, dtype=np.float32)
    pairs = np.zeros((LAST_TOKENS * width if followers else 0, width), dtype=np.float32)
    parameters = [weights, bias, pairs] if followers else [weights, bias]
    adam = Adam(parameters, options.learning_rate)
    rng = np.random.default_rng(options.seed)
    rounds = max(options.rounds, -(-options.steps * options.batch // max(len(learnt), 1)))
    for _ in range(rounds):
        order = rng.permutation(len(learnt))
        for begin in range(0, len(order), options.batch):
            if time_left.is_up:
                break
            some = order[begin : begin + options.batch]
            logits, recent = learnt.logits[some], learnt.recent[some].astype(np.float32)
            wrong = _chances(logits, recent, *parameters) - learnt.follow[some]
            wrong /= len(some)
            gradients = [np.einsum("nre,ne->r", logits, wrong), wrong.sum(axis=0)]
            adam.step([*gradients, recent.T @ wrong] if followers else gradients)
    chances = np.clip(_chances(held_out.logits, held_out.recent.astype(np.float32), *parameters), NEVER, 1 - NEVER)
    losses = np.where(held_out.follow > 0, -np.log(chances), -np.log(1 - chances))
    return _Layer(weights, bias, pairs, float(losses.sum() / max(losses.size, 1)))


def _chances(logits: Array, recent: Array, weights: Array, bias: Array, pairs: Array | None = None) -> Array:
    found = np.einsum("nre,r->ne", logits, weights) + bias
    if pairs is not None:
        found += recent @ pairs
    chances: Array = 1 / (1 + np.exp(-found))
    return chances
