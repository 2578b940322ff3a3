"""The chance that the next tokens of running sequences use an expert: a logistic regression on their past use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.activation_matrix import Rows, tokens_by_sequence
from greenroom.policies.base.array_types import Ids, Keys, Mask
from greenroom.policies.base.events import Artifact, LayerRouting, Step
from greenroom.policies.base.expert_keys import Catalogue

Array = NDArray[np.float32]

REUSE: Final = "reuse"
"""The kind of artifact that holds the coefficients."""

KEEP_OVER_ALL: Final = 0.9995
"""What the moving average over all sequences keeps of its value at each token."""
NEVER: Final = 1e-4
"""The least value of an average, since its logarithm is taken."""
LAST_TOKENS: Final = 2
"""So many of a sequence's last tokens enter with their own picks."""
_MOST_TOKENS: Final = 512
"""The last tokens of a prompt's chunk that count. Even the slowest average keeps nothing of earlier ones."""
_FIRST_ROOM: Final = 4


@dataclass(frozen=True, eq=False)
class Coefficients:
    """The regression's, as in ``core.reuse_file.ReuseFile``. ``followers``: ``[2 E, E]`` a layer, or empty."""

    keep: Array
    weights: Array
    bias: Array
    followers: tuple[Array, ...]

    @classmethod
    def of_artifact(cls, catalogue: Catalogue, artifact: Artifact) -> Coefficients:
        """Raises InvalidConfig for an artifact of another kind or pool."""
        if artifact.kind != REUSE:
            raise InvalidConfig("kind", artifact.kind, REUSE)
        try:
            keep, weights, bias, flat = (
                np.asarray(artifact.arrays[name], dtype=np.float32) for name in ("keep", "weights", "bias", "followers")
            )
        except KeyError as error:
            raise InvalidConfig("arrays", sorted(artifact.arrays), f"with {error}") from None
        widths = catalogue.experts_per_layer.tolist()
        pairs = LAST_TOKENS * sum(width * width for width in widths)
        if (weights.shape, bias.shape) != ((catalogue.layers, len(keep) + 1), (catalogue.size,)):
            raise InvalidConfig("weights", weights.shape, f"those of {catalogue!r}")
        if len(flat) not in (0, pairs):
            raise InvalidConfig("followers", len(flat), f"none, or {pairs} for {catalogue!r}")
        followers, place = [], 0
        for width in widths if len(flat) else ():
            size = LAST_TOKENS * width * width
            followers.append(flat[place : place + size].reshape(LAST_TOKENS * width, width))
            place += size
        return cls(keep, weights, bias, tuple(followers))

    @classmethod
    def untraced(cls, catalogue: Catalogue) -> Coefficients:
        """For a model whose routing was never recorded: those of gpt-oss-20b, the mean over its layers, no followers.

        ``greenroom reuse fit --trace PATH --averages-only`` and ``greenroom reuse show`` print them.
        """
        weights = np.tile(np.array(_UNTRACED_WEIGHTS, dtype=np.float32), (catalogue.layers, 1))
        bias = np.full(catalogue.size, _UNTRACED_BIAS, dtype=np.float32)
        return cls(np.array(_UNTRACED_KEEP, dtype=np.float32), weights, bias, ())


_UNTRACED_KEEP: Final = (0.5, 0.8, 0.92, 0.97, 0.99)
_UNTRACED_WEIGHTS: Final = (0.130, -0.004, 0.071, 0.249, 0.358, 0.021)
_UNTRACED_BIAS: Final = -0.081


def logit(average: Array) -> Array:
    """log(a / (1 − a)) of each average a, clipped to ``NEVER`` .. 1 − ``NEVER``."""
    clipped = np.maximum(average, np.float32(NEVER))
    np.minimum(clipped, np.float32(1 - NEVER), out=clipped)
    clipped /= 1 - clipped
    return np.log(clipped, out=clipped)


def _chance(logits: Array) -> Array:
    """1 / (1 + e^−x) of each logit x. Overwrites ``logits``."""
    np.negative(logits, out=logits)
    np.exp(logits, out=logits)
    logits += 1
    return np.reciprocal(logits, out=logits)


class ReuseChances:
    """``soon[N]``: the chance that any running sequence uses the expert in its layer's next turn.

    For each sequence it keeps moving averages of the sequence's routing at several rates, and the picks of its last two
    tokens. The averages start at the one over all sequences. Prefill and decode count alike. A row changes nothing in
    layers that it does not run in, such as the encoder's while it decodes.
    """

    def __init__(self, catalogue: Catalogue, coefficients: Coefficients) -> None:
        self.catalogue = catalogue
        shares = catalogue.top_k / catalogue.experts_per_layer
        self.over_all: Array = shares.astype(np.float32)[catalogue.layer_of]
        """``[N]``: the moving average over the tokens of all sequences."""
        self.soon: Array = self.over_all.copy()
        self._begin_with(coefficients)

    def _begin_with(self, coefficients: Coefficients) -> None:
        self.coefficients = coefficients
        self._keep = coefficients.keep[:, None]
        self._gain = 1 - self._keep
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        rates, size = len(coefficients.keep), self.catalogue.size
        self._averages: Array = np.zeros((0, rates + 1, size), dtype=np.float32)  # the last rate: ``over_all``
        self._recent: Array = np.zeros((0, LAST_TOKENS, size), dtype=np.float32)
        self._misses: Array = np.ones((0, size), dtype=np.float32)  # 1 - chance; 1 in free rows
        self._unrouted: Mask = np.zeros((0, self.catalogue.layers), dtype=np.bool_)  # in layers where it is still 1
        self._step: Step | None = None
        self._step_rows: Rows = np.empty(0, dtype=np.intp)

    def swap(self, coefficients: Coefficients) -> None:
        """Use other coefficients, in each layer from its next turn on. If their averages have other rates, the past use
        of the running sequences is forgotten.
        """
        if np.array_equal(coefficients.keep, self.coefficients.keep):
            self.coefficients = coefficients
        else:
            self._begin_with(coefficients)

    def _rows_of(self, sequences: Ids) -> Rows:
        """The row of each sequence. A new sequence gets one, which may make the arrays longer."""
        known = self._rows
        return np.array([known[one] if one in known else self._begin(one) for one in sequences.tolist()], dtype=np.intp)

    def logits(self, sequences: Ids) -> Array:
        """``[S, N]``: the logit of the chance that each sequence's next token uses each expert.

        In a layer in which a sequence was never routed, that of one like all sequences.
        """
        rows = self._rows_of(sequences)  # may make the arrays longer
        chances = 1 - self._misses[rows]
        unrouted = self._unrouted[rows]
        for layer in np.flatnonzero(unrouted.any(axis=0)).tolist():
            new = np.flatnonzero(unrouted[:, layer])
            chances[new, self.catalogue.spans[layer]] = self._chances(layer, rows[new])
        return logit(chances)

    def past_logits(self, sequences: Ids) -> Array:
        """``[S, N]``: the same for sequences that have been routed, and NaN for others. Changes nothing."""
        found: Array = np.full((len(sequences), self.catalogue.size), np.nan, dtype=np.float32)
        known = np.array([one in self._rows for one in sequences.tolist()], dtype=np.bool_)
        if known.any():
            found[known] = self.logits(sequences[known])
        return found

    def end(self, sequence: int) -> None:
        """Forget an ended sequence."""
        row = self._rows.pop(sequence, None)
        if row is None:
            return
        self._step = None  # a sequence that joins may get this row
        self._misses[row] = 1
        self._free.append(row)
        if self._rows:  # without any, the last one's chances are the best guess for the next
            np.subtract(1, self._misses.prod(axis=0), out=self.soon)

    def add(self, routing: LayerRouting) -> None:
        """Count a routed layer."""
        if self.catalogue.decoder_start:
            routing = _of_those_routed(routing)
        if not routing.step.rows:
            return
        if routing.step is not self._step:
            self._step, self._step_rows = routing.step, self._rows_of(routing.step.sequences)
        rows = self._step_rows
        self._unrouted[rows, routing.layer] = False
        span = self.catalogue.spans[routing.layer]
        count = routing.step.rows
        kept = KEEP_OVER_ALL**count
        self.over_all[span] *= kept
        if count == 1:
            self.over_all[routing.experts] += 1 - kept
            self._add_token(int(rows[0]), span, routing.experts)
        else:
            self.over_all[routing.experts] += routing.rows * np.float32((1 - kept) / count)
            if len(rows) == 1:
                self._add_tokens(int(rows[0]), span, _tokens(routing))
            else:
                self._add_each(routing, rows, span)
        self._averages[rows, -1, span] = self.over_all[span]
        if len(self._rows) == 1:
            chances = self._chances_of_one(routing.layer, int(rows[0]))
            self.soon[span] = chances
            np.subtract(1, chances, out=self._misses[rows[0], span])
        else:
            self._misses[rows, span] = 1 - self._chances(routing.layer, rows)
            np.subtract(1, self._misses[:, span].prod(axis=0), out=self.soon[span])

    def _add_token(self, row: int, span: slice, experts: Keys) -> None:
        averages, recent = self._averages[row, :-1], self._recent[row]
        averages[:, span] *= self._keep
        averages[:, experts] += self._gain
        recent[1, span] = recent[0, span]
        recent[0, span] = 0
        recent[0, experts] = 1

    def _add_tokens(self, row: int, span: slice, tokens: Array) -> None:
        """Count several tokens of one sequence: ``tokens[T, experts of the layer]``, the newest last."""
        recent = self._recent[row, :, span]
        self._recent[row, :, span] = np.concatenate((tokens[: -LAST_TOKENS - 1 : -1], recent))[:LAST_TOKENS]
        tokens = tokens[-_MOST_TOKENS:]
        ages = np.arange(len(tokens) - 1, -1, -1, dtype=np.float32)
        averages = self._averages[row, :-1, span]
        averages *= self._keep ** np.float32(len(tokens))
        averages += (self._gain * self._keep**ages) @ tokens

    def _add_each(self, routing: LayerRouting, rows: Rows, span: slice) -> None:
        """Count several sequences: those with one token together, the others one by one."""
        of_row = routing.step.sequence_of_row
        alone = np.bincount(of_row, minlength=len(rows)) == 1
        if alone.any():
            tokens = np.minimum(tokens_by_sequence(routing)[alone], 1)
            own = rows[alone]
            averages = self._averages[own, :-1, span]
            averages += self._gain * (tokens[:, None] - averages)
            self._averages[own, :-1, span] = averages
            self._recent[own, 1, span] = self._recent[own, 0, span]
            self._recent[own, 0, span] = tokens
        if alone.all():
            return
        tokens = _tokens(routing)
        for place in np.flatnonzero(~alone).tolist():
            self._add_tokens(int(rows[place]), span, tokens[of_row == place])

    def _chances_of_one(self, layer: int, row: int) -> Array:
        """``[experts of the layer]``: the chance of a use by the sequence's next token."""
        span, of = self.catalogue.spans[layer], self.coefficients
        logits = of.weights[layer] @ logit(self._averages[row, :, span])
        logits += of.bias[span]
        if of.followers:
            logits += self._recent[row, :, span].ravel() @ of.followers[layer]
        return _chance(logits)

    def _chances(self, layer: int, rows: Rows) -> Array:
        """``[S, experts of the layer]``: the same for several sequences."""
        span, of = self.catalogue.spans[layer], self.coefficients
        logits = of.weights[layer] @ logit(self._averages[rows, :, span])
        logits += of.bias[span]
        if of.followers:
            logits += self._recent[rows, :, span].reshape(len(rows), -1) @ of.followers[layer]
        return _chance(logits)

    def _begin(self, sequence: int) -> int:
        if not self._free:
            room = max(len(self._misses), _FIRST_ROOM)
            self._free = list(range(len(self._misses), len(self._misses) + room))
            for name, empty in (("_averages", 0), ("_recent", 0), ("_misses", 1)):
                array: Array = getattr(self, name)
                more = np.full((room, *array.shape[1:]), empty, dtype=np.float32)
                setattr(self, name, np.concatenate((array, more)))
            self._unrouted = np.concatenate((self._unrouted, np.zeros((room, self.catalogue.layers), dtype=np.bool_)))
        row = self._free.pop(0)
        self._rows[sequence] = row
        self._averages[row] = self.over_all
        self._recent[row] = 0
        self._unrouted[row] = True
        return row


def _of_those_routed(routing: LayerRouting) -> LayerRouting:
    """The routing without rows that have no pick in this layer."""
    if routing.picks is None or len(routing.picks) != routing.step.rows:
        return routing
    routed = (routing.picks < routing.catalogue.experts_per_layer[routing.layer]).any(axis=1)
    if routed.all():
        return routing
    step = routing.step
    those = Step(step.pool, step.number, step.row_sequences[routed], step.row_phases[routed])
    return LayerRouting(routing.catalogue, those, routing.layer, routing.experts, routing.rows, routing.picks[routed])


def _tokens(routing: LayerRouting) -> Array:
    """``[T, experts of the layer]``: 1 where the token was routed. Where the picks were not recorded, each token has
    its share of every expert's rows.
    """
    span, picks = routing.catalogue.spans[routing.layer], routing.picks
    width = span.stop - span.start
    if picks is None or len(picks) != routing.step.rows:
        tokens: Array = np.zeros((routing.step.rows, width), dtype=np.float32)
        tokens[:, routing.experts - span.start] = np.minimum(routing.rows / routing.step.rows, 1)
        return tokens
    tokens = np.zeros((len(picks), width + 1), dtype=np.float32)
    np.put_along_axis(tokens, np.minimum(picks.astype(np.intp), width), 1, axis=1)
    return tokens[:, :width]
