"""Tables of tokens out of recorded routing: counted, and weighed by a logistic regression a layer.

ExpertFlow's predictor (section 3.1) without a network: the chances of all layers before the forward, from the row's
token, the tokens before it and, where that is told, what its sequence has picked so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import LARGEST_VOCABULARY, PathsFile
from greenroom.core.artifacts.paths_forms.tables import (
    ALONE,
    BACKS_OFF_TO,
    GRAMS,
    LARGEST_KNOWN,
    MODES,
    PAST,
    PICKS,
    TABLES,
    feature_names,
)
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.policies.base.array_types import Counts, Mask
from greenroom.policies.base.events import Phase
from greenroom.predictor.kinds.fit_time import FitTime
from greenroom.predictor.kinds.path.fit import sequence_logits
from greenroom.predictor.kinds.paths.counts import (
    Array,
    GramCounts,
    Rows,
    backed_off,
    in_sequences,
    logit,
    looked_up,
    same_before,
    tokens_back,
)
from greenroom.predictor.kinds.paths.logistic import fitted
from greenroom.predictor.kinds.reuse.fit import moving
from greenroom.replay.traces.held_out import sequences_to_learn_from
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import texts_digest, tokens_of, vocabulary_of

KEEP: Final = (0.9, 0.98)
"""What the averages over earlier tokens keep at a token: the last ten, and the last fifty."""
MAX_BYTES: Final = 64 * MIB
LEAST_TOKENS: Final = 500
REUSE_SHARE: Final = 0.25
"""Of the time, for the coefficients of what is known of sequences, where they are fitted too."""

_MOST_PICKS: Final = 2**22
"""Of a layer: tokens times experts. With many experts fewer tokens are learnt from, the last ones."""
_MOST_SAMPLED: Final = 2**17
"""Of a layer: rows times experts by which the tables are weighed."""
_LARGEST: Final = 10.0
"""A table adds or takes at most this."""
_BEGIN: Final = {
    "token": 0.75, "pair": 0.6, "triple": 0.8, "before": 0.15, "pair_before": 0.25, "two_before": 0.05,
}  # fmt: skip
_BEGIN_PAST: Final = 0.5


@dataclass(frozen=True, slots=True)
class FitOptions:
    """``held_out``: the share of the sequences that are not learnt from, the last ones, at least one. ``max_bytes``:
    what the tables may take; the most frequent are kept, of single tokens first. ``vocabulary``: how many ids the model
    knows; None: as many as the tables tell. ``seconds``: in which all of it is to be done, layers for which time runs
    short by weights of another model; None: as long as it takes. ``seed``: which rows are weighed by.
    ``least_sequences``: a token, pair or triple that fewer sequences have is in no table and in no list, since those
    that one sequence alone has are its text. Raises InvalidConfig.
    """

    held_out: float = 0.1
    max_bytes: int = MAX_BYTES
    vocabulary: int | None = None
    seed: int = 0
    seconds: float | None = None
    least_sequences: int = 1

    def __post_init__(self) -> None:
        if self.vocabulary is not None and not 1 <= self.vocabulary <= LARGEST_VOCABULARY:
            raise InvalidConfig("vocabulary", self.vocabulary, f"a number of token ids, 1 to {LARGEST_VOCABULARY:,}")
        if self.least_sequences < 1:
            raise InvalidConfig("least_sequences", self.least_sequences, "a number of sequences from 1")


def fit(
    trace: RoutingTrace,
    reuse: ReuseFile,
    options: FitOptions | None = None,
    *,
    on_layer: Callable[[int], object] = lambda _: None,
) -> PathsFile:
    """``reuse`` says what is known of each token's sequence. ``on_layer`` is called when a layer is done, with how many
    are. Raises InvalidConfig where there is too little to learn from, or ``reuse`` is another model's; TraceError for a
    trace without tokens, or with ids beyond the vocabulary.
    """
    began, options = time.monotonic(), options or FitOptions()
    tokens_of(trace, options.vocabulary)
    widths = tuple(trace.experts_per_layer.tolist())
    if reuse.experts_per_layer != widths:
        raise InvalidConfig("reuse", reuse.shape, f"coefficients of the traced model, {trace.layers} layers")
    trace = trace.part(_first_sequence(trace))
    learnt = sequences_to_learn_from(trace, options.held_out, least=LEAST_TOKENS)
    samples = _Samples(trace, int(trace.seq_starts[learnt]), options.seed, options.least_sequences)
    chosen = _chosen(samples.grams, options.max_bytes, sum(widths))
    left = None if options.seconds is None else options.seconds - (time.monotonic() - began)
    time_left = FitTime(left, trace.layers)
    layers = []
    for layer in range(trace.layers):
        time_left.begin()
        layers.append(_fitted(samples, layer, reuse, chosen, lambda: time_left.is_up))
        on_layer(layer + 1)
    tensors: dict[str, NDArray[Any]] = {
        "popularity": np.concatenate([one.popularity for one in layers]),
        "bias": np.concatenate([one.bias for one in layers], axis=1),
        "weights": np.stack([one.weights for one in layers], axis=2),
        "keep": np.array(KEEP, dtype=np.float32),
        "tokens": samples.known.astype(np.uint32),
    }
    for name, gram in samples.grams.items():
        logits = np.concatenate([one.tables[name] for one in layers], axis=1)
        unit = np.float32(max(float(np.abs(logits).max(initial=0)), 1e-3) / 127)
        tensors[f"{name}.keys"] = gram.keys[chosen[name]]
        tensors[f"{name}.logits"] = np.rint(logits / unit).astype(np.int8)
        tensors[f"{name}.unit"] = np.array([unit], dtype=np.float32)
    return PathsFile(
        model=trace.model,
        experts_per_layer=widths,
        sequences=trace.sequences,
        form=TABLES,
        vocabulary=options.vocabulary or _vocabulary(trace, samples.known),
        tensors=tensors,
        report={
            "tokens": samples.learnt_rows,
            "held_out_tokens": trace.tokens - samples.learnt_rows,
            "known_tokens": len(samples.known),
            "least_sequences": options.least_sequences,
            "rare_tokens": samples.rare,
            "numbered_texts": texts_digest(trace),
            "rows": {name: len(chosen[name]) for name in GRAMS},
            "left_out": {name: samples.distinct(name) - len(chosen[name]) for name in GRAMS},
            "recall": {
                name: round(float(sum(one.found[name] for one in layers) / max(1, sum(one.picks for one in layers))), 4)
                for name in layers[0].found
            },
            "seconds": round(time.monotonic() - began, 1),
        },
    )


def _vocabulary(trace: RoutingTrace, known: Counts) -> int:
    """As far as what is kept tells; of numbered texts all of them and the unknown token."""
    return vocabulary_of(trace) if trace.token_texts is not None else int(known.max(initial=0)) + 1


def _first_sequence(trace: RoutingTrace) -> int:
    """From which on there are few enough tokens, and two sequences at least."""
    most = _MOST_PICKS // int(trace.experts_per_layer.max())
    first = int(np.searchsorted(trace.seq_starts, trace.tokens - most))
    recorded = np.flatnonzero(np.diff(trace.seq_starts))
    return min(first, int(recorded[-2]) if len(recorded) > 1 else 0)


class _Samples:
    """Rows of a trace as what is learnt from and what is held out."""

    def __init__(self, trace: RoutingTrace, learnt_rows: int, seed: int, least_sequences: int) -> None:
        self.trace, self.learnt_rows = trace, learnt_rows
        ids = tokens_of(trace)
        if trace.token_texts is not None:
            ids = np.where(ids < len(trace.token_texts), ids, -1)
        learnt = np.arange(trace.tokens) < learnt_rows
        sequence = np.repeat(np.arange(trace.sequences), np.diff(trace.seq_starts))
        rows = np.flatnonzero(learnt & (ids >= 0))
        shared = in_sequences(ids[rows], sequence[rows]) >= least_sequences
        self.known, self.rare = np.unique(ids[rows[shared]])[:LARGEST_KNOWN], len(np.unique(ids[rows[~shared]]))
        places = looked_up(self.known, ids)
        back = np.stack([tokens_back(places, trace.seq_starts, one) for one in range(3)], axis=1)
        self.grams = {
            name: GramCounts(name, back, len(self.known), learnt, sequence, least_sequences) for name in GRAMS
        }
        self.same = same_before(ids, trace.seq_starts)
        rows = np.flatnonzero(learnt)
        if trace.phase is not None:
            decoded = rows[trace.phase[rows] == Phase.DECODE]
            rows = decoded if len(decoded) >= LEAST_TOKENS else rows
        most = max(LEAST_TOKENS, _MOST_SAMPLED // int(trace.experts_per_layer.max()))
        some = np.random.default_rng(seed).permutation(len(rows))[:most]
        self.weighed: Rows = np.sort(rows[some])
        self.held_out: Rows = np.arange(learnt_rows, trace.tokens)

    def distinct(self, name: str) -> int:
        """How many rows a table would have, of pairs and triples those of the known tokens."""
        gram = self.grams[name]
        return len(gram.codes) + gram.rare + (self.rare if len(GRAMS[name]) == 1 else 0)

    def picked(self, layer: int) -> Array:
        """``[T, experts of the layer]``: 1 where the row was routed."""
        width = int(self.trace.experts_per_layer[layer])
        found = np.zeros((self.trace.tokens, width + 1), dtype=np.float32)
        np.put_along_axis(found, np.minimum(self.trace.experts[:, layer].astype(np.intp), width), 1, axis=1)
        return found[:, :width]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """``tables[name] [R, E]``. ``found``: of the ``picks`` held out, how many are foreseen by what."""

    popularity: Array
    bias: Array
    weights: Array
    tables: Mapping[str, Array]
    found: Mapping[str, float]
    picks: float


def _chosen(grams: Mapping[str, GramCounts], max_bytes: int, size: int) -> dict[str, Rows]:
    """Which rows of each table are kept: the most frequent, of single tokens first."""
    cost = np.concatenate([np.full(len(gram.codes), size + 4 * len(GRAMS[name])) for name, gram in grams.items()])
    single = np.concatenate([np.full(len(gram.codes), len(GRAMS[name]) == 1) for name, gram in grams.items()])
    counts = np.concatenate([gram.counts for gram in grams.values()])
    order = np.lexsort((-counts, ~single))  # stable: what is backed off to comes first
    kept = np.zeros(len(order), dtype=np.bool_)
    kept[order[np.cumsum(cost[order]) <= max_bytes]] = True
    ends = np.cumsum([len(gram.codes) for gram in grams.values()])[:-1]
    return {name: np.flatnonzero(one) for name, one in zip(grams, np.split(kept, ends), strict=True)}


def _fitted(
    samples: _Samples, layer: int, reuse: ReuseFile, chosen: Mapping[str, Rows], is_up: Callable[[], bool]
) -> _Layer:
    picked = samples.picked(layer)
    share: Array = picked[: samples.learnt_rows].mean(axis=0)
    popularity = logit(share)
    features = _Features(samples, layer, picked, share, reuse)
    count = len(feature_names(len(KEEP)))
    begin = np.zeros((len(MODES), count), dtype=np.float32)
    begin[:, : len(GRAMS)] = list(_BEGIN.values())
    past = len(GRAMS) + len(KEEP)
    begin[PAST:, past] = _BEGIN_PAST
    used = (slice(past), slice(past + 2), slice(count))
    weights, bias = np.zeros_like(begin), np.zeros((len(MODES), picked.shape[1]), dtype=np.float32)
    later = samples.weighed[features.has_past(samples.weighed)]
    for mode, rows in ((ALONE, samples.weighed), (PAST, later), (PICKS, later)):
        of_mode = features.of(rows, used[mode].stop)
        weights[mode, used[mode]], bias[mode] = fitted(
            of_mode, picked[rows], popularity, begin[mode, used[mode]], is_up
        )
    kept = {name: features.tables[name][chosen[name]] for name in GRAMS}
    found, picks = _recall(features, samples.held_out, weights, bias)
    return _Layer(popularity, bias, weights, kept, found, picks)


class _Features:
    """What is known of rows before their forward, of one layer."""

    def __init__(self, samples: _Samples, layer: int, picked: Array, share: Array, reuse: ReuseFile) -> None:
        self.samples, self.picked, self.popularity = samples, picked, logit(share)
        self._share, self._sums = share, {name: gram.sums(picked) for name, gram in samples.grams.items()}
        self.tables = self._tables()
        trace = samples.trace
        own = self._grams(np.arange(trace.tokens), ("token",))[0]
        self._context: Array = np.zeros((len(KEEP), *own.shape), dtype=np.float32)
        nothing: Array = np.zeros(own.shape[1], dtype=np.float32)
        for begin, end in zip(trace.seq_starts[:-1].tolist(), trace.seq_starts[1:].tolist(), strict=True):
            for number, keep in enumerate(KEEP):
                if end - begin > 1:
                    self._context[number, begin + 1 : end] = moving(own[begin : end - 1], nothing, keep)
        known = sequence_logits(trace, layer, reuse)
        self._past: Array = np.full(own.shape, np.nan, dtype=np.float32)
        self._past[known.rows] = known.logits - self.popularity

    def has_past(self, rows: Rows) -> Mask:
        """Of which the sequence has been routed before."""
        known: Mask = ~np.isnan(self._past[rows, 0])
        return known

    def of(self, rows: Rows, count: int) -> Array:
        """``[F, rows, E]``: the first ``count`` of ``feature_names``."""
        found = [*self._grams(rows, tuple(GRAMS)), *self._context[:, rows]]
        if len(found) < count:
            past: Array = np.nan_to_num(self._past[rows])
            unknown = self.samples.grams["token"].counts_without(rows) == 0
            found += [past, past * unknown[:, None]]
        if len(found) < count:
            same = self.samples.same[:, rows]
            found += [np.where((one >= 0)[:, None], self.picked[one], 0) for one in same]
            found += [np.broadcast_to((one >= 0)[:, None], found[0].shape) for one in same]
        return np.stack(found).astype(np.float32)

    def _tables(self) -> dict[str, Array]:
        chances: dict[str, Array] = {}
        found = {}
        for name, gram in self.samples.grams.items():
            prior = np.broadcast_to(self._share, (len(gram.codes), len(self._share)))
            if name in BACKS_OFF_TO:
                prior = chances[BACKS_OFF_TO[name]][backed_off(self.samples.grams, name, len(self.samples.known))]
            chances[name] = gram.chances(self._sums[name], prior)
            found[name] = np.clip(logit(chances[name]) - logit(prior), -_LARGEST, _LARGEST)
        return found

    def _grams(self, rows: Rows, names: tuple[str, ...]) -> list[Array]:
        """By the other sequences' tokens alone, so that what a table says of a row does not come from that row."""
        chances: dict[str, Array] = {}
        found = []
        for name in names:
            prior = np.broadcast_to(self._share, (len(rows), len(self._share)))
            if name in BACKS_OFF_TO:
                prior = chances[BACKS_OFF_TO[name]]
            chances[name] = self.samples.grams[name].chances_without(rows, self._sums[name], prior)
            found.append(np.clip(logit(chances[name]) - logit(prior), -_LARGEST, _LARGEST))
        return found


def _recall(features: _Features, rows: Rows, weights: Array, bias: Array) -> tuple[dict[str, float], float]:
    """How many of the picks of ``rows`` are among as many experts of the highest chance: by popularity, by the token's
    own table, and in each mode. And how many picks there are."""
    found = dict.fromkeys(("popularity", "token", *MODES), 0.0)
    picks = 0.0
    for begin in range(0, len(rows), _MOST_SAMPLED // 32):
        some = rows[begin : begin + _MOST_SAMPLED // 32]
        picked = features.picked[some]
        of_rows = features.of(some, weights.shape[1])
        base = np.broadcast_to(features.popularity, picked.shape)
        has_past = features.has_past(some)[:, None]
        alone = base + bias[ALONE] + np.tensordot(weights[ALONE], of_rows, 1)
        ranked = {"popularity": base, "token": base + of_rows[0]}
        for mode, name in enumerate(MODES):
            known = base + bias[mode] + np.tensordot(weights[mode], of_rows, 1)
            ranked[name] = np.where(has_past, known, alone)
        for name, logits in ranked.items():
            found[name] += _hits(logits, picked)
        picks += float(picked.sum())
    return found, picks


def _hits(logits: Array, picked: Array) -> float:
    """Picks of each row among as many experts as the row has picks."""
    counts = picked.sum(axis=1).astype(np.intp)
    order = np.argsort(-logits, axis=1, kind="stable")
    among = np.arange(picked.shape[1]) < counts[:, None]
    return float(np.take_along_axis(picked, order, axis=1)[among].sum())
